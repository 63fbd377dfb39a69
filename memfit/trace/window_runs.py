"""A window of a trace, cut into runs: the operators of one part of the window that follow each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.events import ALLOCATE, EMPTY_CACHE, FREE, Trace

ELSEWHERE = -1
"""The run of a storage that the window did not make."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowRuns:
    """A window, made by ``window_runs``. S: storages of the trace."""

    trace: Trace
    begin: int
    """Its first run, counted over the trace."""
    parts: tuple[str, ...]
    """The part of each run."""
    operators: np.ndarray
    """int (runs + 1,): the first operator of each run, and the end."""
    events: np.ndarray
    """int (runs + 1,): the first event of each run, and the end."""
    run: np.ndarray
    """int (S,): the run that made a storage, or ELSEWHERE."""
    until: np.ndarray
    """int (S,): the run that frees a storage; the number of runs where none does."""

    def operator_slice(self, run: int) -> slice:
        """The operators of a run."""
        return slice(int(self.operators[run]), int(self.operators[run + 1]))

    def event_slice(self, run: int) -> slice:
        """The events of a run."""
        return slice(int(self.events[run]), int(self.events[run + 1]))

    def offsets(self, run: int) -> np.ndarray:
        """int (events,): the operator of each event of a run, counted from the run's first one."""
        offsets: np.ndarray = self.trace.operator[self.event_slice(run)] - self.operators[run]
        return offsets

    def made(self, run: int) -> np.ndarray:
        """The storages that a run made, in order."""
        events = self.event_slice(run)
        made: np.ndarray = self.trace.storage[events][self.trace.kind[events] == ALLOCATE]
        return made

    def passed(self, run: int, later: int) -> np.ndarray:
        """The storages that a run made and that are there when a later one begins, in order."""
        made = self.made(run)
        passed: np.ndarray = made[self.until[made] >= later]
        return passed

    @property
    def left(self) -> np.ndarray:
        """bool (S,): the storages that the window made and that are there when it ends."""
        left: np.ndarray = (self.run != ELSEWHERE) & (self.until == len(self.parts))
        return left

    def names(self, run: int) -> list[str]:
        """The names of a run's operators."""
        return [self.trace.names[name] for name in self.trace.operator_name[self.operator_slice(run)].tolist()]

    def repeated_events(self, run: int, stays: np.ndarray) -> np.ndarray:
        """bool (events,): a run's events that later windows repeat: not the frees of what setup made.

        Args:
            stays: bool (S,), the storages that the window makes for all later ones.
        """
        events = self.event_slice(run)
        kind, storage = self.trace.kind[events], self.trace.storage[events]
        is_once = stays | (self.run == ELSEWHERE)
        repeated: np.ndarray = (kind != EMPTY_CACHE) & ~((storage >= 0) & is_once[storage])
        return repeated


def window_runs(trace: Trace, phase: int, begin: int, runs: int) -> WindowRuns | None:
    """The window of a phase; None where the trace has fewer runs.

    Args:
        phase: its place in ``trace.phases``.
        begin: its first run, counted over the trace.
        runs: how many it has.
    """
    starts = run_starts(trace)
    if begin + runs > len(starts):
        return None
    operators = np.array([*starts.tolist(), len(trace.operator_part)][begin : begin + runs + 1])
    _, first, last = trace.phases[phase]
    own = np.clip(np.searchsorted(operators, trace.operator[first:last], side="right") - 1, 0, runs - 1)
    own = np.maximum.accumulate(own) if len(own) else own  # what an operator's inputs free comes before its own row
    kind, storage = trace.kind[first:last], trace.storage[first:last]
    made, freed = storage[kind == ALLOCATE], storage[kind == FREE]
    run = np.full(len(trace.nbytes), ELSEWHERE)
    run[made] = own[kind == ALLOCATE]
    until = np.full(len(trace.nbytes), runs)
    until[freed] = own[kind == FREE]
    return WindowRuns(
        trace=trace, begin=begin, operators=operators, run=run, until=until,
        parts=tuple(trace.parts[trace.operator_part[row]] for row in operators[:-1].tolist()),
        events=first + np.searchsorted(own, np.arange(runs + 1)),
    )  # fmt: skip


def run_starts(trace: Trace) -> np.ndarray:
    """The first operator of each run of a trace."""
    starts: np.ndarray = np.concatenate([[0], np.flatnonzero(np.diff(trace.operator_part)) + 1])
    return starts


def two_windows(trace: Trace) -> tuple[WindowRuns, WindowRuns] | None:
    """The two windows of a trace; None where they are not made of the same parts in the same order."""
    names, ends = [name for name, _, _ in trace.phases], [end for _, _, end in trace.phases]
    if names[:3] != ["setup", "train", "train"] or "train" in names[3:]:
        return None
    if [start for _, start, _ in trace.phases] != [0, *ends[:-1]] or ends[-1] != len(trace.kind):
        return None
    starts = run_starts(trace)
    parts = [trace.parts[part] for part in trace.operator_part[starts].tolist()]
    begin = next((run for run, part in enumerate(parts) if part != "setup"), len(parts))
    last = int(trace.operator[ends[0] : ends[1]].max(initial=0))
    again = next((run for run in range(begin, len(parts)) if starts[run] > last and parts[run] == parts[begin]), None)
    if again is None:
        return None
    first, second = (window_runs(trace, phase, at, again - begin) for phase, at in ((1, begin), (2, again)))
    return (first, second) if first and second and first.parts == second.parts else None
