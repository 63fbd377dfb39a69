"""A second window put behind the first one of a trace, run by run: its storages, operators and events.

``memfit.trace.second_window`` says which they are. Storages are numbered as a tracer numbers them: in the order in
which they are made, and those that ``memfit.trace.operator_scratch.with_scratch`` adds behind all others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memfit.events import ALLOCATE, FREE, Trace
from memfit.trace.applied_run import AppliedRun, Merged
from memfit.trace.trace_columns import (
    CARD_CALL,
    COSTS,
    OPERATORS,
    STORAGES,
    by_appearance,
    card_call_of,
    scratch_of,
    storage_numbers,
)
from memfit.trace.window_runs import ELSEWHERE, WindowRuns


class AppendedWindow:
    """The second window; storages of all runs are made before events of any.

    Args:
        own: the first window.
        second: the second window of the other trace.
    """

    def __init__(self, own: WindowRuns, second: WindowRuns) -> None:
        self._own, self._second = own, second
        trace, like = own.trace, second.trace
        self._next = len(trace.nbytes)
        self._again = np.full(len(trace.nbytes), -1)
        """The new storage by the one of ``own`` that it repeats."""
        self._added = np.full(len(like.nbytes), -1)
        """The new storage by the one of ``second``, where it repeats none."""
        self._columns = {name: [getattr(trace, name)] for name in STORAGES}
        self._is_scratch = [scratch_of(trace)]
        self._is_scratch_of_like = scratch_of(like)
        self._made_by: list[tuple[int, np.ndarray]] = []
        """By run: the operator that made each new storage, counted from the run's first one."""
        self._operators: list[dict[str, np.ndarray]] = []
        self._events: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """By run: kind, storage, and operator, counted from the run's first one."""
        self._names = {name: number for number, name in enumerate(trace.names)}
        self._card_call = card_call_of(trace)
        """By operator of ``own``, its number in the table of calls."""
        self._card_calls = {call: number for number, call in enumerate(trace.card_calls)}

    def make_storages(self, run: int, again: np.ndarray, source: np.ndarray) -> None:
        """Makes storages as a run of ``second`` does.

        Args:
            again: its storages.
            source: those of ``own`` whose bytes they have; -1: their own.
        """
        trace, like, new = self._own.trace, self._second.trace, self._numbered(len(again))
        paired = source >= 0
        self._again[source[paired]] = new[paired]
        self._added[again[~paired]] = new[~paired]
        self._columns["nbytes"].append(np.where(paired, trace.nbytes[source], like.nbytes[again]))
        self._columns["category"].append(like.category[again])
        self._columns["stream"].append(like.stream[again])
        self._is_scratch.append(self._is_scratch_of_like[again])
        self._made_by.append((run, like.made_by[again] - self._second.operators[run]))

    def repeat_storages(self, run: int, made: np.ndarray, added: np.ndarray, operators: Merged) -> None:
        """Makes storages as a run of ``own`` does, and those that ``second`` adds.

        Args:
            made: those of ``own``.
            added: those of ``second``.
            operators: the run's operators.
        """
        trace, like = self._own.trace, self._second.trace
        self._again[made], self._added[added] = self._numbered(len(made)), self._numbered(len(added))
        for name in STORAGES:
            self._columns[name] += [getattr(trace, name)[made], getattr(like, name)[added]]
        self._is_scratch += [self._is_scratch[0][made], self._is_scratch_of_like[added]]
        made_by = operators.where_repeated(trace.made_by[made] - self._own.operators[run])
        added_by = operators.where_added(like.made_by[added] - self._second.operators[run])
        self._made_by += [(run, made_by), (run, added_by)]

    def make_events(self, run: int, operators: np.ndarray, source: np.ndarray, left: np.ndarray) -> None:
        """Adds a run of ``second``.

        Args:
            operators: for each operator, the one of ``own``'s run whose cost it has; -1: its own.
            source: int (S of the other trace,), the storages of ``own`` that those of ``second`` repeat; -1: none.
            left: int (S of the other trace,), the storages here for those of setup, and of the first window that are
                left at its end.
        """
        trace, like = self._own.trace, self._second.trace
        rows, own_rows = self._second.operator_slice(run), self._own.operator_slice(run)
        columns = {
            "operator_name": self._names_of(rows),
            "operator_module": like.operator_module[rows],
            "operator_part": np.full(rows.stop - rows.start, trace.operator_part[own_rows.start]),
        }
        for name in COSTS:
            costs, repeated = getattr(like, name)[rows].copy(), operators >= 0
            costs[repeated] = getattr(trace, name)[own_rows][operators[repeated]]
            columns[name] = costs
        columns[CARD_CALL] = card_calls = self._card_calls_of(rows, operators < 0)
        card_calls[operators >= 0] = self._card_call[own_rows][operators[operators >= 0]]
        self._operators.append(columns)
        events = self._second.event_slice(run)
        storage = like.storage[events]
        is_made = (storage >= 0) & (self._second.run[storage] != ELSEWHERE)
        made = np.where(source[storage] >= 0, self._again[source[storage]], self._added[storage])
        storage = np.where(is_made, made, np.where(storage >= 0, left[storage], storage))
        self._events.append((like.kind[events], storage, self._second.offsets(run)))

    def repeat_events(self, run: int, applied: AppliedRun, left: np.ndarray) -> None:
        """Adds a run of ``own``, with what ``second`` adds.

        Args:
            applied: its operators and events.
            left: as of ``make_events``.
        """
        trace, like = self._own.trace, self._second.trace
        own_rows, rows = self._own.operator_slice(run), self._second.operator_slice(run)
        operators, events = applied.operators, applied.events
        part = np.full(len(operators.added), trace.operator_part[own_rows.start])
        columns = {"operator_part": part} | {
            name: operators.column(getattr(trace, name)[own_rows], getattr(like, name)[rows])
            for name in ("operator_module", *COSTS)
        }
        columns["operator_name"] = operators.column(trace.operator_name[own_rows], self._names_of(rows))
        is_added = np.isin(np.arange(rows.stop - rows.start), operators.added)
        columns[CARD_CALL] = operators.column(self._card_call[own_rows], self._card_calls_of(rows, is_added))
        self._operators.append(columns)
        own_events, like_events = self._own.event_slice(run), self._second.event_slice(run)
        storage = trace.storage[own_events]
        storage = np.where(self._own.run[storage] != ELSEWHERE, self._again[storage], storage)
        storage_like = like.storage[like_events]
        storage_like = np.where(like.kind[like_events] == FREE, left[storage_like], self._added[storage_like])
        kind = events.column(trace.kind[own_events], like.kind[like_events])
        self._events.append((kind, events.column(storage, storage_like), applied.event_operators))

    def behind_the_first(self, replaced: np.ndarray) -> Trace | None:
        """The trace of the first window with this one behind it; None where a storage is freed that is not there.

        Args:
            replaced: bool (S,), storages of the first window that this one replaces: later events are of those that
                replace them.
        """
        own, trace = self._own, self._own.trace
        end, row = int(own.events[-1]), int(own.operators[-1])
        begins = row + np.cumsum([0, *(len(columns["operator_name"]) for columns in self._operators)])
        count = int(begins[-1]) - row
        later = trace.storage[end:]
        later = np.where((later >= 0) & replaced[later], self._again[later], later)
        kind = np.concatenate([trace.kind[:end], *(kind for kind, _, _ in self._events), trace.kind[end:]])
        storage = np.concatenate([trace.storage[:end], *(storage for _, storage, _ in self._events), later])
        inner = [offsets + begins[run] for run, (_, _, offsets) in enumerate(self._events)]
        operator = np.concatenate([trace.operator[:end], *inner, trace.operator[end:] + count])
        numbers = storage_numbers(kind, storage, np.concatenate(self._is_scratch))
        if numbers is None:
            return None
        is_later = np.ones(len(trace.nbytes), bool)
        is_later[trace.storage[:end][trace.kind[:end] == ALLOCATE]] = False
        columns: dict[str, Any] = {name: np.concatenate(some) for name, some in self._columns.items()}
        made_by = [trace.made_by + count * is_later, *(offsets + begins[run] for run, offsets in self._made_by)]
        columns["made_by"] = np.concatenate(made_by)
        columns = {name: column[np.argsort(numbers)] for name, column in columns.items()}
        for name in OPERATORS:
            column, added = getattr(trace, name), [some[name] for some in self._operators]
            columns[name] = np.concatenate([column[:row], *added, column[row:]])
        columns["operator_name"], names = by_appearance(columns["operator_name"], tuple(self._names))
        columns["operator_part"], parts = by_appearance(columns["operator_part"], trace.parts)
        columns[CARD_CALL], card_calls = by_appearance(columns[CARD_CALL], tuple(self._card_calls))
        columns |= {"kind": kind, "operator": operator, "storage": np.where(storage >= 0, numbers[storage], -1)}
        grown = len(kind) - len(trace.kind)
        phases = [(name, start + grown, stop + grown) for name, start, stop in trace.phases[2:]]
        return replace(
            trace, names=names, parts=parts, card_calls=card_calls,
            phases=(*trace.phases[:2], ("train", end, end + grown), *phases),
            **{name: column.astype(getattr(trace, name).dtype) for name, column in columns.items()},
        )  # fmt: skip

    def _names_of(self, rows: slice) -> np.ndarray:
        """int: the numbers here of the names of operators of the other trace."""
        like = self._second.trace
        names = [self._names.setdefault(like.names[name], len(self._names)) for name in like.operator_name[rows]]
        return np.array(names, int)

    def _card_calls_of(self, rows: slice, chosen: np.ndarray) -> np.ndarray:
        """int: the numbers here of what the chosen operators of the other trace call; of all others, of no call."""
        like, calls = self._second.trace, self._card_calls
        column = np.full(rows.stop - rows.start, calls.setdefault("", len(calls)))
        numbers = card_call_of(like)[rows]
        for number in np.unique(numbers[chosen]).tolist():
            column[chosen & (numbers == number)] = calls.setdefault(like.card_calls[number], len(calls))
        return column

    def _numbered(self, count: int) -> np.ndarray:
        self._next += count
        return np.arange(self._next - count, self._next)
