"""The second window of a trace that has only its first one, after another trace of the same step that has both.

A step's second window does what its first one did, but for what is made once: the optimizers' state, cuBLAS's
workspaces, the buckets that DDP cuts anew, and gradients and outputs of the first window that the second one replaces.
How the two windows of a trace differ is read run by run (``memfit.trace.window_runs``), and the first window of the
other trace is repeated with the same differences:

* A run whose events are those of the trace with both windows, in other bytes, is repeated as that one's second window
  has it. What only the second window makes must not depend on the micro-batch.
* A run of other events, such as those of another kernel for attention, is repeated where the trace with both windows
  repeats its own, but for what is made once (``memfit.trace.repeated_run``, ``memfit.trace.applied_run``).

Where a run is neither, the second window does not follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.events import CATEGORIES, FREE, Trace
from memfit.trace.appended_window import AppendedWindow
from memfit.trace.applied_run import AppliedRun, applied_run
from memfit.trace.repeated_run import FIXED, all_equal, makes_what_is_fixed, repeated_run
from memfit.trace.window_runs import ELSEWHERE, WindowRuns, two_windows, window_runs

_WORKSPACE = CATEGORIES.index("workspace")


def second_window_follows(trace: Trace, like: Trace) -> bool:
    """Whether ``with_second_window`` may give a trace its second window.

    Args:
        trace: setup and one window; nothing behind it is looked at.
        like: the same step at another size or on another card, with both windows.
    """
    return _second_window(trace, like) is not None


def with_second_window(trace: Trace, like: Trace) -> Trace | None:
    """The trace with a second window; None where it does not follow.

    Args:
        trace: setup, one window, and what comes behind it.
        like: as of ``second_window_follows``.
    """
    second_window = _second_window(trace, like)
    return None if second_window is None else second_window.appended()


def _second_window(trace: Trace, like: Trace) -> _SecondWindow | None:
    windows = two_windows(like)
    count = min(len(trace.modules), len(like.modules))  # those of validation come last, and may not have run yet
    if windows is None or trace.modules[:count] != like.modules[:count] or not _same_setup(trace, like):
        return None
    first, second = windows
    own = window_runs(trace, 1, first.begin, len(first.parts))
    rows = slice(int(second.operators[0]), int(second.operators[-1]))
    if own is None or own.parts != first.parts or like.operator_module[rows].max(initial=0) >= count:
        return None
    second_window = _SecondWindow(own, first, second)
    return second_window if second_window.follows() else None


def _same_setup(trace: Trace, like: Trace) -> bool:
    _, _, end = trace.phases[0]
    return (
        trace.phases[0] == like.phases[0]
        and [name for name, _, _ in trace.phases[:2]] == ["setup", "train"]
        and np.array_equal(trace.kind[:end], like.kind[:end])
        and np.array_equal(trace.storage[:end], like.storage[:end])
        and np.array_equal(trace.nbytes[trace.storage[:end]], like.nbytes[like.storage[:end]])
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """How a run of the second window differs from that of the first, in the trace that has both."""

    storages: np.ndarray
    """int: for each storage of the second window's run, the one of the first that it stands for; -1: none."""
    operators: np.ndarray
    """int: for each operator of the second window's run, the one of the first, from the run's first; -1: none."""
    lacks: bool
    """Whether the second window has no counterpart of a storage that does not stay."""


class _SecondWindow:
    """The second window behind ``own``, as ``second`` is behind ``first`` in the other trace."""

    def __init__(self, own: WindowRuns, first: WindowRuns, second: WindowRuns) -> None:
        self._own, self._first, self._second = own, first, second
        self._like = like = first.trace
        events = slice(int(second.events[0]), int(second.events[-1]))
        freed = np.zeros(len(like.nbytes), bool)
        freed[like.storage[events][like.kind[events] == FREE]] = True
        self._replaced, self._stays = first.left & freed, first.left & ~freed
        self._pairs = [self._paired(run) for run in range(len(first.parts))]
        self._left = self._paired_left()
        self._own_stays = self._chosen(self._stays, len(own.trace.nbytes))
        self._alike = [self._is_alike(run) for run in range(len(first.parts))]
        self._changes: list[_Change] = []
        self._applied: list[AppliedRun | None] = []
        """By run: what is repeated; None where the run is alike, or does not follow."""
        self._stands_for = np.full(len(like.nbytes), -1)
        """int (S of the other trace,): for storages of the second window those of the first; -1: none."""
        for run, is_alike in enumerate(self._alike):
            change, applied = (self._change(run), None) if is_alike else self._repeat(run)
            self._changes.append(change)
            self._applied.append(applied)
            self._stands_for[second.made(run)] = change.storages

    def follows(self) -> bool:
        """Whether the second window follows."""
        return (
            self._leaves_the_same()
            and self._is_replaced_by_its_like()
            and all(self._run_follows(run) for run in range(len(self._changes)))
        )

    def appended(self) -> Trace | None:
        """The trace with it."""
        own, left = self._own, self._left
        window = AppendedWindow(own, self._second)
        for run, (change, applied) in enumerate(zip(self._changes, self._applied, strict=True)):
            again, source = self._second.made(run), change.storages
            if applied is None:
                window.make_storages(run, again, np.where(source >= 0, self._pairs[run][source], -1))
            else:
                made = own.made(run)
                window.repeat_storages(run, made[~self._own_stays[made]], again[source < 0], applied.operators)
        for run, (change, applied) in enumerate(zip(self._changes, self._applied, strict=True)):
            if applied is None:
                source = np.where(self._stands_for >= 0, self._pairs[run][self._stands_for], -1)
                window.make_events(run, change.operators, source, left)
            else:
                window.repeat_events(run, applied, left)
        return window.behind_the_first(self._chosen(self._replaced, len(own.trace.nbytes)))

    def _chosen(self, storages: np.ndarray, count: int) -> np.ndarray:
        """bool (S of own,): the counterparts of storages that the first window left."""
        chosen = np.zeros(count, bool)
        left = self._left[storages]
        chosen[left[left >= 0]] = True
        return chosen

    # ---- how the two windows of the other trace differ

    def _repeat(self, run: int) -> tuple[_Change, AppliedRun | None]:
        """How a run that is not alike differs, and what it is here; None where it does not follow."""
        first, second, none = self._first, self._second, np.zeros(0, int)
        repeated = repeated_run(first, second, run, self._stays, self._replaced, self._stands_for)
        if repeated is None:
            return _Change(storages=np.full(len(second.made(run)), -1), operators=none, lacks=True), None
        applied = applied_run(repeated, second, self._own, self._own_stays)
        return _Change(storages=repeated.storages, operators=none, lacks=False), applied

    def _change(self, run: int) -> _Change:
        like, first, second = self._like, self._first, self._second
        made, again = first.made(run), second.made(run)
        made = made[~self._stays[made]]
        kinds, kinds_again = (
            list(zip(like.nbytes[some].tolist(), like.operator_name[like.made_by[some]].tolist(), strict=True))
            for some in (made, again)
        )
        source = _aligned(kinds, kinds_again)
        self._pair_replacements(made, again, source)
        columns = (like.operator_name, like.operator_module, like.operator_flops, like.operator_bytes)
        calls, calls_again = (
            list(zip(*(column[rows].tolist() for column in columns), strict=True))
            for rows in (first.operator_slice(run), second.operator_slice(run))
        )
        return _Change(
            storages=np.where(source >= 0, made[source], -1) if len(made) else source,
            operators=_aligned(calls, calls_again),
            lacks=len(np.unique(source[source >= 0])) < len(made),
        )

    def _pair_replacements(self, made: np.ndarray, again: np.ndarray, source: np.ndarray) -> None:
        """Pairs what the second window replaces and leaves in turn, in the order in which they are made, where the runs
        are not aligned there and both have the same bytes: the state of an optimizer that makes its state anew.

        Args:
            made, again: storages of a run of the first and the second window.
            source: for each of ``again``, the place in ``made`` of its counterpart, or -1; pairs are added to it.
        """
        is_free = np.ones(len(made), bool)
        is_free[source[source >= 0]] = False
        replaced = np.flatnonzero(is_free & self._replaced[made])
        left = np.flatnonzero((source < 0) & self._second.left[again])
        if np.array_equal(self._like.nbytes[made[replaced]], self._like.nbytes[again[left]]):
            source[left] = replaced

    # ---- how the first windows of the two traces differ

    def _paired(self, run: int) -> np.ndarray:
        """int (S of the other trace,): the storages here of the run itself, of setup, and of earlier runs; -1 for those
        that have no counterpart.

        Of an earlier run, storages are paired in their order where it passes as many to this one, and those that this
        run frees in the order in which it does, where they have the same bytes.
        """
        own, first = self._own, self._first
        pairs = np.where(first.run == ELSEWHERE, np.arange(len(first.run)), -1)
        for earlier in range(run + 1):
            is_own = earlier == run
            passed, passed_like = (
                window.made(earlier) if is_own else window.passed(earlier, run) for window in (own, first)
            )
            if len(passed) == len(passed_like):
                pairs[passed_like] = passed
        freed, freed_like = (
            window.trace.storage[events][window.trace.kind[events] == FREE]
            for window, events in ((own, own.event_slice(run)), (first, first.event_slice(run)))
        )
        if len(freed) == len(freed_like):
            made_in = first.run[freed_like]
            is_same = (own.run[freed] == made_in) & (made_in != ELSEWHERE) & (made_in < run)
            is_same &= own.trace.nbytes[freed] == self._like.nbytes[freed_like]
            pairs[freed_like[is_same]] = freed[is_same]
        return pairs

    def _paired_left(self) -> np.ndarray:
        """int (S of the other trace,): the storages here of setup, and those that the window leaves for what the other
        first window leaves; -1 for the others.

        Paired are those of one run, module and category, of which gradients and optimizer state have the same bytes:
        a layer's gradients may be made in another order where a batch has one item. cuBLAS's workspaces, which stay,
        are made wherever its first product is.
        """
        own, first = self._own, self._first
        pairs = np.where(first.run == ELSEWHERE, np.arange(len(first.run)), -1)
        for run in range(len(first.parts)):
            (left, keys), (left_like, keys_like) = (self._left_of(window, run) for window in (own, first))
            order, order_like = np.lexsort(keys), np.lexsort(keys_like)
            if keys.shape == keys_like.shape and np.array_equal(keys[:, order], keys_like[:, order_like]):
                pairs[left_like[order_like]] = left[order]
        return pairs

    def _left_of(self, window: WindowRuns, run: int) -> tuple[np.ndarray, np.ndarray]:
        """(storages of a run that a window leaves, int (3, storages): what pairs them)."""
        trace, left = window.trace, window.passed(run, len(window.parts))
        category = trace.category[left].astype(int)
        fixed_bytes = np.where(np.isin(category, FIXED), trace.nbytes[left], 0)
        module = trace.operator_module[trace.made_by[left]]
        return left, np.stack([fixed_bytes, np.where(category == _WORKSPACE, 0, module), category])

    def _is_alike(self, run: int) -> bool:
        own, first, trace, like = self._own, self._first, self._own.trace, self._like
        rows, rows_like = own.operator_slice(run), first.operator_slice(run)
        events, events_like = own.event_slice(run), first.event_slice(run)
        storage, storage_like = trace.storage[events], like.storage[events_like]
        if len(storage) != len(storage_like) or own.names(run) != first.names(run):
            return False
        real, real_like = storage[storage >= 0], storage_like[storage_like >= 0]
        return all_equal(
            (trace.kind[events], like.kind[events_like]),
            (own.offsets(run), first.offsets(run)),
            (trace.operator_module[rows], like.operator_module[rows_like]),
            (real, self._pairs[run][real_like]),
            (trace.category[real], like.category[real_like]),
            (trace.stream[real], like.stream[real_like]),
        )

    def _leaves_the_same(self) -> bool:
        """Whether both first windows leave the same."""
        left = self._first.left
        return int(self._own.left.sum()) == int(left.sum()) and bool((self._left[left] >= 0).all())

    def _is_replaced_by_its_like(self) -> bool:
        """Whether the other second window leaves counterparts of what it replaces, and beside them only what stays."""
        like, second = self._like, self._second
        later = np.zeros(len(like.nbytes), bool)
        events = slice(int(second.events[-1]), None)
        later[like.storage[events][like.kind[events] == FREE]] = True
        again = np.concatenate([second.made(run) for run in range(len(self._changes))])
        source = np.concatenate([change.storages for change in self._changes])
        paired = source >= 0
        is_left, replaces = second.left[again], paired & self._replaced[source]
        return (
            np.array_equal(is_left[paired], replaces[paired])
            and not (is_left & ~paired & later[again]).any()
            and int(replaces.sum()) == int(self._replaced.sum())
        )

    def _run_follows(self, run: int) -> bool:
        change = self._changes[run]
        if not self._alike[run]:
            return self._applied[run] is not None
        if (change.storages >= 0).all() and (change.operators >= 0).all():
            return True
        own, first, trace, like = self._own, self._first, self._own.trace, self._like
        made, made_like = own.made(run), first.made(run)
        rows, rows_like = own.operator_slice(run), first.operator_slice(run)
        is_constant = len(made) > 0 and all_equal(
            (trace.nbytes[made], like.nbytes[made_like]),
            (trace.operator_flops[rows], like.operator_flops[rows_like]),
            (trace.operator_bytes[rows], like.operator_bytes[rows_like]),
        )
        added = self._second.made(run)[change.storages < 0]
        is_added = change.operators < 0
        adds_what_is_fixed = (
            not change.lacks
            and bool(np.isin(like.category[added], FIXED).all())
            and bool(makes_what_is_fixed(self._second, run)[is_added].all())  # others may cost more in a larger batch
        )
        return is_constant or adds_what_is_fixed


def _aligned(before: list[Any], after: list[Any]) -> np.ndarray:
    """int (len(after),): the place in ``before`` of each; -1 of those between an equal begin and an equal end."""
    begin, most = 0, min(len(before), len(after))
    while begin < most and before[begin] == after[begin]:
        begin += 1
    end = 0
    while end < most - begin and before[-1 - end] == after[-1 - end]:
        end += 1
    middle = np.full(len(after) - begin - end, -1)
    return np.concatenate([np.arange(begin), middle, np.arange(len(before) - end, len(before))]).astype(int)
