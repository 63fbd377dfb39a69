"""Steps of a job at every micro-batch between traced ones: their events, and each storage's bytes on a line.

One length, checkpoint mode and accumulation is a ``StepKind``. Its step is traced at a few micro-batches. Between two
of them that make the same events, the bytes of every storage lie on the line through both if a third size in between
lies on it, too; otherwise the interval is halved. What is left between two sizes with other events is not derived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.errors import InputError, describe
from memfit.events import FAILED, Trace
from memfit.geometry import MOST
from memfit.job import Job, Shape
from memfit.planner.largest import largest_size
from memfit.planner.predict import checkpoint_all, plain_nets, trace_question
from memfit.planner.prediction import TracedQuestion, footprint_on, holds_for
from memfit.trace.extra_window import with_third_window
from memfit.trace.interpolation import interpolated

TRACES = 12
"""Traces of one kind of step, at most."""
LARGEST = 1 << 16
"""Items of a micro-batch, at most."""
BEYOND = 1.1
"""The largest micro-batch needs this multiple of the largest card's memory."""
LENGTH_PARTS = (4, 2, 1)
"""Lengths are the longest one over each of these."""
EXACT = 1 << 53
"""Whole numbers below it are exact as JavaScript's doubles."""


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What a step is traced with, apart from its items."""

    checkpoint: str
    """none or all."""
    accumulated: bool
    """Whether a window has two micro-batches or more; further ones repeat the second."""
    world: int
    """Ranks: 1, or those of DDP."""
    length: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRange:
    """Micro-batches of ``low`` to ``high`` items whose steps make the same events."""

    low: int
    high: int
    trace: Trace
    """The step at ``low``."""
    high_bytes: np.ndarray
    """int64 (S,): bytes of the storages at ``high``."""

    def bytes_at(self, items: int) -> np.ndarray | None:
        """int64 (S,): bytes of the storages at so many items; None where one is no whole number."""
        if self.low == self.high:
            return self.trace.nbytes
        products = (self.high_bytes - self.trace.nbytes) * (items - self.low)
        added, rest = np.divmod(products, self.high - self.low)
        return None if rest.any() else self.trace.nbytes + added


@dataclass(frozen=True, kw_only=True)
class DerivedKind:
    """A kind of step, and the ranges of items in which it is derived."""

    kind: StepKind
    ranges: tuple[StepRange, ...]
    refused: str
    """What the job's code raised at a size that is not derived; empty where it raised nothing."""


@dataclass(frozen=True, kw_only=True)
class CardGroup:
    """Cards that share every trace, and the steps on them."""

    cards: tuple[Device, ...]
    kinds: tuple[DerivedKind, ...]


def traced_lengths(job: Job) -> tuple[int | None, ...]:
    """The lengths at which steps are traced; multiples of 32 where the longest item allows it."""
    if job.longest is None:
        return (None,)
    parts = {job.longest // part for part in LENGTH_PARTS if job.longest >= part}
    return tuple(sorted({length // 32 * 32 if 32 <= length < job.longest else length for length in parts}))


def card_groups(job: Job, devices: Sequence[Device], ranks: int = 1) -> list[CardGroup]:
    """The steps of a job, traced for each of these cards whose traces no earlier one shares.

    Args:
        ranks: further to one rank, steps of so many under DDP are derived.

    Raises:
        InputError: a device is no card, or its memory is not known.
    """
    groups: list[CardGroup] = []
    for device in devices:
        if not device.is_cuda:
            raise InputError(f"device {device.key}", "steps are derived for cards alone", "write --device rtx4090")
        if device.usable_bytes is None:
            raise InputError(f"device {device.key}", "its memory is not known", "give --memory SIZE")
        if not any(device in group.cards for group in groups):
            groups.append(_group(job, device, (1, ranks) if ranks > 1 else (1,)))
    return groups


def _group(job: Job, device: Device, worlds: Sequence[int]) -> CardGroup:
    steps = _Steps(job, device)
    recomputed = bool(steps.modes["all"])
    kinds = [
        StepKind(checkpoint=checkpoint, accumulated=accumulated, world=world, length=length)
        for world in worlds
        for checkpoint in (("none", "all") if recomputed else ("none",))
        for accumulated in (False, True)
        for length in traced_lengths(job)
    ]
    most = {length: steps.most_items(length) for length in traced_lengths(job)}
    derived = tuple(steps.derived(kind, most[kind.length]) for kind in kinds)
    return CardGroup(cards=tuple(steps.sharing_cards()), kinds=derived)


class _Steps:
    """The traced steps of a job on one card."""

    def __init__(self, job: Job, device: Device) -> None:
        self._job, self._device = job, device
        self.modes: dict[str, dict[str, str]] = {"none": {}, "all": checkpoint_all(job, plain_nets(job))}
        self._questions: list[TracedQuestion] = []
        self._trace = cache(self._traced)

    def _traced(self, kind: StepKind, items: int) -> Trace | str:
        """The trace that a card's allocator replays, or what the job's code raised."""
        try:
            question = trace_question(
                self._job, Shape(items=items, length=kind.length), self._device,
                micro_batches=1 + kind.accumulated, checkpointing=self.modes[kind.checkpoint],
                engine="ddp" if kind.world > 1 else "single", world=kind.world,
            )  # fmt: skip
        except Exception as error:  # the job's code is the user's: sizes that it refuses are not derived
            return describe(error)
        self._questions.append(question)
        (trace,) = question.traces.values()
        return with_third_window(trace)

    def most_items(self, length: int | None) -> int:
        """Items that no card of the group holds, by the line through two steps that need least memory."""
        kind = StepKind(checkpoint="all" if self.modes["all"] else "none", accumulated=False, world=1, length=length)
        bound = min(LARGEST, MOST // (length or 1))
        low, high = self._trace(kind, 2), self._trace(kind, 4)
        if isinstance(low, str) or isinstance(high, str):
            return 4
        limit = max(card.usable_bytes or 0 for card in self.sharing_cards()) * BEYOND

        def needs(more: int) -> int:
            trace = interpolated(low, high, more / 2)
            if trace is None:
                return int(limit) + 1
            return max(phase.process_bytes for phase in footprint_on(trace, self._device).phases.values())

        more, _ = largest_size(needs, int(limit), most=bound)
        return max(min(2 + (more or 1), bound), 4)

    def sharing_cards(self) -> list[Device]:
        """Cards for which every trace so far holds; the card itself first."""
        others = [card for card in catalogue().values() if card.key != self._device.key and card.usable_bytes]
        return [
            self._device,
            *(card for card in others if all(holds_for(question, card) for question in self._questions)),
        ]

    def derived(self, kind: StepKind, most: int) -> DerivedKind:
        """The ranges of items up to ``most`` in which a kind of step is derived."""
        ranges = derived_ranges(lambda items: self._trace(kind, items), most)
        answers = [self._trace(kind, items) for items in (1, 2, most)]
        refused = next((answer for answer in answers if isinstance(answer, str)), "")
        return DerivedKind(kind=kind, ranges=tuple(ranges), refused=refused)


def derived_ranges(trace_at: Callable[[int], Trace | str], most: int) -> list[StepRange]:
    """The ranges of items, ascending, in which a step follows from two traced ones.

    Args:
        trace_at: the step at so many items, or why there is none.
        most: the largest size.
    """
    known: dict[int, Trace | None] = {}

    def trace(items: int) -> Trace | None:
        if items not in known:
            traced = trace_at(items)
            usable = not isinstance(traced, str) and all(name != FAILED for name, _, _ in traced.phases)
            known[items] = traced if usable else None  # type: ignore[assignment]
        return known[items]

    ranges = _alone(1, trace(1))
    open_ends = deque([(2, most)])
    while open_ends:
        low, high = open_ends.popleft()
        line = _line(low, trace(low), high, trace(high))
        middle = _between(low, high)
        if middle in (low, high):
            ranges += [line] if line is not None else [*_alone(low, trace(low)), *_alone(high, trace(high))]
        elif len(known) >= TRACES:
            ranges += [*_alone(low, trace(low)), *_alone(high, trace(high))]
        elif line is not None and _is_on(line, middle, trace(middle)):
            ranges.append(line)
        else:
            open_ends += [(low, middle), (middle, high)]
    return _without_repeats(ranges)


def _between(low: int, high: int) -> int:
    """A size between two others, as many times the lower as the higher is of it."""
    middle = math.isqrt(low * high)
    return middle if low < middle < high else (low + high) // 2


def _line(low: int, first: Trace | None, high: int, last: Trace | None) -> StepRange | None:
    """The range between two sizes; None where their steps differ by more than bytes, or reach beyond exact numbers."""
    if first is None or last is None or not _same_events(first, last):
        return None
    largest = max(int(trace.nbytes.astype(object).sum()) for trace in (first, last))
    steepest = int(np.abs(last.nbytes - first.nbytes).max(initial=0))
    if 2 * largest >= EXACT or steepest * (high - low) >= EXACT:
        return None
    return StepRange(low=low, high=high, trace=first, high_bytes=last.nbytes)


def _is_on(line: StepRange, items: int, trace: Trace | None) -> bool:
    nbytes = line.bytes_at(items)
    return (
        trace is not None and nbytes is not None and _same_events(line.trace, trace)
        and np.array_equal(nbytes, trace.nbytes)
    )  # fmt: skip


def _alone(items: int, trace: Trace | None) -> list[StepRange]:
    """The range of one traced size."""
    line = _line(items, trace, items, trace)
    return [] if line is None else [line]


def _without_repeats(ranges: list[StepRange]) -> list[StepRange]:
    """The ranges, ascending, without single sizes that are the end of another."""
    wide = [item for item in ranges if item.low < item.high]
    ends = {end for item in wide for end in (item.low, item.high)}
    single = {item.low: item for item in ranges if item.low == item.high and item.low not in ends}
    return sorted([*wide, *single.values()], key=lambda item: item.low)


def _same_events(first: Trace, other: Trace) -> bool:
    columns = ("kind", "storage", "category", "stream")
    return (
        first.phases == other.phases
        and first.net_kind == other.net_kind
        and all(np.array_equal(getattr(first, name), getattr(other, name)) for name in columns)
    )
