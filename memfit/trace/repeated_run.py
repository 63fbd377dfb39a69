"""How the second window of a trace repeats a run of the first one, so that another trace can repeat its own run so.

The second window repeats the operators and events of the run, with two exceptions:

* It omits operators that only make what stays, such as a gradient scaler's scale.
* It adds operators that only make what the nets alone determine, such as the buckets that DDP cuts anew, and it frees
  what it replaces, and what setup made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, FREE
from memfit.trace.window_runs import ELSEWHERE, WindowRuns

FIXED = np.array([CATEGORIES.index(name) for name in ("communication", "optimizer", "gradients", "ema")], np.uint8)
"""What depends on the nets alone."""

Call = tuple[str, int]
"""An operator's name and its module."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RepeatedRun:
    """What ``repeated_run`` reads. Operators and events are counted from the run's first one.

    A place is the number of operators before it, of those that both windows have.
    """

    run: int
    storages: np.ndarray
    """int: for each storage of the second window's run, the one of the first that it stands for; -1: none."""
    calls: tuple[Call, ...]
    """The operators that both windows have."""
    omitted: tuple[Call, ...]
    """Those that the second window omits."""
    operators: np.ndarray
    """int: those that it adds."""
    operator_places: np.ndarray
    """int: the place of each."""
    kinds: np.ndarray
    """int8: the kind of each event that both windows have."""
    places: np.ndarray
    """int: the place behind the operator of each."""
    events: np.ndarray
    """int: the events that the second window adds."""
    event_places: np.ndarray
    """int: the place of each."""


class Events(NamedTuple):
    """Events of a run."""

    kinds: np.ndarray
    """int8: the kind of each."""
    storages: np.ndarray
    """int: the storage of each; -1: none."""
    operators: np.ndarray
    """int: the operator of each, counted from the run's first one; -1: before it."""


def repeated_run(
    first: WindowRuns, second: WindowRuns, run: int, stays: np.ndarray, replaced: np.ndarray, stands_for: np.ndarray
) -> RepeatedRun | None:
    """How the second window repeats a run; None where it does something else.

    Args:
        first, second: the windows of a trace. S: its storages.
        run: the run.
        stays: bool (S,), the storages that the first window makes for all later ones.
        replaced: bool (S,), the storages that the first window leaves and the second one frees.
        stands_for: int (S,), for storages of earlier runs of the second window, those of the first; -1 for others.
    """
    both = _operators_of_both(first, second, run, stays)
    if both is None:
        return None
    operators, operators_again, omitted = both
    added_operators = np.delete(np.arange(len(second.names(run))), operators_again)
    before, after = events_of(first, run, first.repeated_events(run, stays)), events_of(second, run)
    is_of_added = np.isin(after.operators, added_operators)
    is_of_setup = (first.run == ELSEWHERE) & (second.run == ELSEWHERE)
    is_freed = (after.kinds == FREE) & (replaced | is_of_setup)[after.storages]
    is_added = is_freed | ((after.kinds == ALLOCATE) & is_of_added)
    if is_of_added[~is_added].any():  # what an operator frees that the first window does not have
        return None
    places, places_again = (
        places_behind(some, events.operators) for some, events in ((operators, before), (operators_again, after))
    )
    own, added = np.flatnonzero(~is_added), np.flatnonzero(is_added)
    storages = _counterparts(first, second, run, stays, after.storages[added])
    if (
        storages is None
        or not all_equal((before.kinds, after.kinds[own]), (places, places_again[own]))
        or not _are_behind(places, places_again[added], np.searchsorted(own, added))
    ):
        return None
    stands_for = stands_for.copy()
    stands_for[second.made(run)] = storages
    storage, again = before.storages, after.storages[own]
    columns = (first.trace.nbytes, first.trace.category, first.trace.stream)
    if not all_equal((storage, stands_for[again]), *((column[storage], column[again]) for column in columns)):
        return None
    calls = calls_of(first, run)
    return RepeatedRun(
        run=run, storages=storages, calls=tuple(calls[row] for row in operators), omitted=omitted,
        operators=added_operators, operator_places=places_behind(operators_again, added_operators),
        kinds=before.kinds, places=places, events=added, event_places=places_again[added],
    )  # fmt: skip


def calls_of(window: WindowRuns, run: int) -> list[Call]:
    """The operators of a run."""
    modules = window.trace.operator_module[window.operator_slice(run)].tolist()
    return list(zip(window.names(run), modules, strict=True))


def events_of(window: WindowRuns, run: int, chosen: np.ndarray | None = None) -> Events:
    """The events of a run, or those that are chosen of it."""
    events, rows = window.event_slice(run), slice(None) if chosen is None else chosen
    return Events(
        kinds=window.trace.kind[events][rows],
        storages=window.trace.storage[events][rows],
        operators=window.offsets(run)[rows],
    )


def makes_what_stays(window: WindowRuns, run: int, stays: np.ndarray) -> np.ndarray:
    """bool (operators,): those of a run that make what stays, and free at most what setup made."""
    kinds, storages, operators = events_of(window, run)
    is_made = (kinds == ALLOCATE) & stays[storages]
    is_of_setup = (kinds == FREE) & (window.run[storages] == ELSEWHERE)
    chosen = np.zeros(len(window.names(run)), bool)
    chosen[operators[is_made & (operators >= 0)]] = True
    chosen[operators[~is_made & ~is_of_setup & (operators >= 0)]] = False
    return chosen


def makes_what_is_fixed(window: WindowRuns, run: int) -> np.ndarray:
    """bool (operators,): those of a run that make what depends on the nets alone, and read and compute nothing."""
    trace, rows, made = window.trace, window.operator_slice(run), window.made(run)
    made = made[trace.made_by[made] >= rows.start]
    row = trace.made_by[made] - rows.start
    is_other = np.zeros(rows.stop - rows.start, bool)
    is_other[row[~np.isin(trace.category[made], FIXED)]] = True
    written = np.zeros(len(is_other), np.int64)
    np.add.at(written, row, trace.nbytes[made])
    is_cheap = (trace.operator_flops[rows] == 0) & (trace.operator_bytes[rows] <= written)
    chosen: np.ndarray = (written > 0) & ~is_other & is_cheap
    return chosen


def places_behind(operators: np.ndarray, of: np.ndarray) -> np.ndarray:
    """int: for each of the operators ``of``, how many of ``operators`` come up to it."""
    places: np.ndarray = np.searchsorted(operators, of, side="right")
    return places


def events_before(places: np.ndarray, place: int) -> int | None:
    """How many events come before a place; None where others come in between.

    Args:
        places: int (events,), the place behind the operator of each.
        place: the place.
    """
    is_before = places <= place
    count = int(is_before.sum())
    return count if is_before[:count].all() else None


def all_equal(*pairs: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether the arrays of each pair are the same."""
    return all(np.array_equal(before, after) for before, after in pairs)


def _operators_of_both(
    first: WindowRuns, second: WindowRuns, run: int, stays: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[Call, ...]] | None:
    """(the operators of the first window that the second one repeats, these of the second window, those that it omits).

    None where it omits and adds others than it may.
    """
    costs, costs_again = _costs(first, run), _costs(second, run)
    may_omit, may_add = makes_what_stays(first, run, stays), makes_what_is_fixed(second, run)
    both: list[tuple[int, int]] = []
    omitted: list[int] = []
    row = row_again = 0
    while row < len(costs) or row_again < len(costs_again):
        if costs[row : row + 1] == costs_again[row_again : row_again + 1]:
            both.append((row, row_again))
            row, row_again = row + 1, row_again + 1
        elif row < len(costs) and may_omit[row]:
            omitted.append(row)
            row += 1
        elif row_again < len(costs_again) and may_add[row_again]:
            row_again += 1
        else:
            return None
    calls = calls_of(first, run)
    omitted_calls = tuple(calls[row] for row in omitted)
    if [row for row in np.flatnonzero(may_omit).tolist() if calls[row] in {*omitted_calls}] != omitted:
        return None  # which ones another trace omits would not be sure
    operators, operators_again = np.array(both, int).reshape(-1, 2).T
    return operators, operators_again, omitted_calls


def _costs(window: WindowRuns, run: int) -> list[tuple[int, ...]]:
    """The operators of a run, with what they cost."""
    trace, rows = window.trace, window.operator_slice(run)
    columns = (trace.operator_name, trace.operator_module, trace.operator_flops, trace.operator_bytes)
    return list(zip(*(column[rows].tolist() for column in columns), strict=True))


def _counterparts(
    first: WindowRuns, second: WindowRuns, run: int, stays: np.ndarray, added: np.ndarray
) -> np.ndarray | None:
    """int: for each storage of the second window's run, the one of the first; -1 for those of ``added``.

    None where they are not as many.
    """
    made, made_again = first.made(run), second.made(run)
    is_own = ~np.isin(made_again, added)
    storages = np.full(len(made_again), -1)
    if int(is_own.sum()) != int((~stays[made]).sum()):
        return None
    storages[is_own] = made[~stays[made]]
    return storages


def _are_behind(places: np.ndarray, places_of_added: np.ndarray, own_before: np.ndarray) -> bool:
    """Whether events are added right at their places, behind all events of the operator in front of them.

    Args:
        places: int (events,), of the events that both windows have, the place behind the operator of each.
        places_of_added: int (added,), the places of the events that are added.
        own_before: int (added,), how many of the events that both windows have come before each.
    """
    before = {place: events_before(places, place) for place in set(places_of_added.tolist())}
    return [before[place] for place in places_of_added.tolist()] == own_before.tolist()
