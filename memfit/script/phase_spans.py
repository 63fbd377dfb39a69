"""Phases of a script that was followed: where each begins and ends, once all of it was seen.

In: what ``StepWatch`` noted (cuts, optimizers, their steps, requests that did not fit). Out: phases in order, with a
forward without gradients that is a part of every window as training, and attempts that ran out of memory apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memfit.events import FAILED, FREE
from memfit.script.outcome import NOWHERE, Line

PhaseSpan = tuple[str, int, int]
"""(name, first event, past the last)."""


@dataclass(kw_only=True)
class Cut:
    """A phase begins at event ``start``."""

    phase: str
    start: int
    trains: bool = True
    """Whether a part of a window is in it. What follows saving and does not train, such as loading, is saving."""
    in_evaluation: bool = False
    """Whether the net was in evaluation mode."""
    of_copy: bool = False
    """Whether the net is a copy of the trained one (an average of its weights, a teacher)."""
    within_window: bool = False
    """Whether the window had trained and not yet stepped."""
    after_epoch: bool = False
    """Whether a loader has ended since the last step."""
    line: Line = NOWHERE
    """The line of the forward."""
    window: int = 0
    """The number of windows before it."""
    after_early: bool = False
    """Whether a condition held early in its window before it, or a loop that was cut short makes its last turn, and may
    have led to the line."""

    @property
    def is_open_evaluation(self) -> bool:
        """Whether the trained net itself ran in evaluation mode, while a window was open."""
        return self.within_window and self.in_evaluation and not self.of_copy


@dataclass(kw_only=True)
class KnownOptimizer:
    """An optimizer of the script."""

    kind: str
    """The name of its class."""
    line: Line
    made_at: int
    """The event before which it was made."""
    steps: int = 0
    last_step: int = 0
    """The event after its last step."""
    weights: set[int] = field(default_factory=set)
    """The ids of the parameters that it trains."""
    states: list[int] = field(default_factory=list)
    """Parameters that had a state after each step."""
    has_sparse: bool = False
    """Whether a gradient is sparse, which fused and 8-bit optimizers do not take."""
    state_storages: set[int] = field(default_factory=set)
    """The numbers of the storages of its state."""


@dataclass(frozen=True, kw_only=True)
class RefusedRequest:
    """A request that did not fit: the start of its window, and the event before which it was made."""

    window_start: int
    end: int
    bytes: int
    freed_at: int = 0
    """The event after the last one that frees what the attempt had: when the script has handled the error."""


def after_frees(kinds: Sequence[int], event: int) -> int:
    """The event after the frees that directly follow: what a phase frees in the end is no part of the next one."""
    while event < len(kinds) and kinds[event] == FREE:
        event += 1
    return event


def phase_spans(
    cuts: Sequence[Cut],
    kinds: Sequence[int],
    optimizers: Mapping[int, KnownOptimizer],
    steps: Sequence[tuple[int, int]],
    failures: Sequence[RefusedRequest],
    *,
    windows: int,
    end: int,
) -> tuple[PhaseSpan, ...]:
    """All phases, in order. Each training window is a phase.

    Args:
        kinds: what each event is.
        optimizers: by number.
        steps: (event, optimizer) of each optimizer step.
        windows: complete windows.
        end: the number of events.
    """
    spans: list[PhaseSpan] = []
    edges = window_ends(steps)
    starts = _starts(cuts, kinds, end)
    for name, start, stop in zip(_final_names(cuts, windows), starts, [*starts[1:], end], strict=True):
        inside = [edge for edge in edges if start < edge < stop] if name == "train" else []
        for low, high in zip([start, *inside], [*inside, stop], strict=True):
            if high > low or name == "save":
                spans.append((name, low, high))
    for low, high in _failed_attempts(optimizers, steps, failures):
        spans = [part for phase in spans for part in _without(phase, low, high)]
    return tuple(spans)


def _starts(cuts: Sequence[Cut], kinds: Sequence[int], end: int) -> list[int]:
    """Where each phase starts: what follows saving, after a copy of a net that was made to be saved is gone."""
    before = ["", *(cut.phase for cut in cuts[:-1])]
    latest = [*(cut.start for cut in cuts[1:]), end]
    return [
        max(cut.start, min(after_frees(kinds, cut.start), last)) if phase == "save" else cut.start
        for cut, phase, last in zip(cuts, before, latest, strict=True)
    ]


def _failed_attempts(
    optimizers: Mapping[int, KnownOptimizer], steps: Sequence[tuple[int, int]], failures: Sequence[RefusedRequest]
) -> list[tuple[int, int]]:
    """(first event, past the last) of each attempt that ran out of memory and was repeated with less.

    If the script makes new optimizers and continues with them, the attempt is everything that the old ones did;
    otherwise it is the window.
    """
    attempts, before = [], 0
    for failure in failures:
        after = {number for event, number in steps if event > failure.end}
        if not after:
            continue
        anew = all(optimizers[number].made_at >= failure.end for number in after)
        made = [known.made_at for known in optimizers.values() if before <= known.made_at < failure.end]
        start = min([*made, failure.window_start]) if anew else failure.window_start
        attempts.append((max(start, before), max(failure.end, failure.freed_at)))
        before = failure.end
    return attempts


def window_ends(steps: Sequence[tuple[int, int]]) -> list[int]:
    """Events after the steps of the optimizer that steps last in a window."""
    order: list[int] = []
    for _, optimizer in steps:
        if optimizer in order:
            break
        order.append(optimizer)
    return [event for event, optimizer in steps if order and optimizer == order[-1]]


def _final_names(cuts: Sequence[Cut], windows: int) -> list[str]:
    """The final phase of each cut: a forward without gradients in every window is training.

    One in an open window is a part of it, unless the net is in evaluation mode there and that does not happen in every
    window: a validation may come before the last gradients of an epoch were used. Of a copy in evaluation mode that is
    so where it runs after epochs alone: a teacher runs within them.
    """
    forwards = [cut for cut in cuts if cut.phase == "validate"]
    steady = _lines_in_each_window([cut for cut in forwards if not cut.in_evaluation or cut.of_copy], windows)
    evaluated = _lines_in_each_window([cut for cut in forwards if cut.is_open_evaluation], windows)
    inside_epochs = {cut.line for cut in forwards if not cut.after_epoch}
    names = []
    for cut in cuts:
        if cut.is_open_evaluation:
            part_of_window = cut.line in evaluated
        elif cut.within_window and cut.in_evaluation and cut.line not in inside_epochs:
            part_of_window = False
        else:
            of_line = (not cut.in_evaluation or cut.of_copy) and cut.line in steady
            part_of_window = cut.within_window or of_line
        if cut.phase == "validate" and part_of_window:
            names.append("train")
        else:
            names.append(cut.phase if cut.trains else "save")
    return names


def validated_after(cuts: Sequence[Cut], steps: Sequence[tuple[int, int]]) -> bool:
    """Whether a validation has begun since the last optimizer step."""
    since = steps[-1][0] if steps else 0
    return any(cut.phase == "validate" and cut.start >= since for cut in reversed(cuts))


def _lines_in_each_window(cuts: Sequence[Cut], windows: int) -> set[Line]:
    """The lines of forwards without gradients that run in every window of ``windows``, and not after an epoch alone.

    What an early condition led to does not count, and its window need not have the line.
    """
    windows = max(windows - 1, 0)
    early = {cut.window for cut in cuts if cut.after_early}
    windows_of: dict[Line, set[int]] = {}
    for cut in cuts:
        if not cut.after_early:
            windows_of.setdefault(cut.line, set()).add(cut.window)
    inside_epochs = {cut.line for cut in cuts if not cut.after_epoch}
    least = max(windows - len(early), 2)
    return {line for line, seen in windows_of.items() if line in inside_epochs and windows >= 2 and len(seen) >= least}


def _without(phase: PhaseSpan, low: int, high: int) -> list[PhaseSpan]:
    """Removes a failed attempt, events ``low`` to ``high``, from a phase."""
    name, start, end = phase
    if end <= low or start >= high:
        return [phase]
    parts = [(name, start, low), (FAILED, max(start, low), min(end, high)), (name, high, end)]
    return [part for part in parts if part[1] < part[2]]
