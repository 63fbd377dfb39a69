"""Steps of a job at every micro-batch between traced ones: their events, and each storage's bytes on a line.

One length, checkpoint mode and accumulation is a ``StepKind``. Its step is traced at a few micro-batches, from which
others follow (``memfit.planner.derived_ranges``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.errors import InputError, describe
from memfit.events import Trace
from memfit.footprint import Footprint
from memfit.geometry import MOST
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_ranges import changes_of, derived_ranges
from memfit.planner.job_facts import JobFacts
from memfit.planner.prediction import TracedQuestion, footprint_on, holds_for, need_on, question_on
from memfit.planner.size_search import largest_size
from memfit.planner.step_range import StepRange, unlike_size
from memfit.trace.event_limit import far_more_than, most_events
from memfit.trace.extra_window import with_third_window
from memfit.trace.interpolation import interpolated

LARGEST = 1 << 16
"""Items of a micro-batch, at most."""
BEYOND = 1.1
"""The largest micro-batch needs this multiple of the largest card's memory."""
LENGTH_PARTS = (4, 2, 1)
"""Lengths are the longest one over each of these."""


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


def traced_lengths(facts: JobFacts) -> tuple[int | None, ...]:
    """The lengths at which steps are traced; multiples of 32 where the longest item allows it."""
    longest = facts.longest
    if longest is None:
        return (None,)
    parts = {longest // part for part in LENGTH_PARTS if longest >= part}
    return tuple(sorted({length // 32 * 32 if 32 <= length < longest else length for length in parts}))


def card_groups(
    asked: AskedJob, devices: Sequence[Device], ranks: int = 1, others: Sequence[Device] = (), *,
    trace_others: bool = True,
) -> list[CardGroup]:  # fmt: skip
    """The steps of a job, traced for each of these cards whose traces no earlier one shares.

    Args:
        ranks: further to one rank, steps of so many under DDP are derived.
        others: further cards. Of those that share no traces, only the step that a page starts with is traced. Without
            any, cards of the catalogue that share traces are added.
        trace_others: False leaves out those that share none.

    Raises:
        InputError: a device is no card, or its memory is not known.
    """
    groups: list[CardGroup] = []
    others = [other for other in others if other.key not in {device.key for device in devices}]
    cards = others or [
        card for card in catalogue().values() if card.usable_bytes and card.key not in {item.key for item in devices}
    ]
    for device in devices:
        if not device.is_cuda:
            raise InputError(f"device {device.key}", "steps are derived for cards alone", "write --device rtx4090")
        if device.usable_bytes is None:
            raise InputError(f"device {device.key}", "its memory is not known", "give --memory SIZE")
        if not any(device in group.cards for group in groups):
            groups.append(_group(asked, device, [*devices, *cards], (1, ranks) if ranks > 1 else (1,)))
    for other in others if trace_others else ():
        if not any(other in group.cards for group in groups):
            groups.append(_group(asked, other, others, ()))
    return groups


def start_kind(facts: JobFacts) -> StepKind:
    """The step that a page starts with: the job's own recomputation, its longest items, one micro-batch, one device."""
    checkpoint = "all" if facts.own else "none"
    return StepKind(checkpoint=checkpoint, accumulated=False, world=1, length=traced_lengths(facts)[-1])


def start_footprint(group: CardGroup, facts: JobFacts, device: Device) -> Footprint | None:
    """The need of the smallest micro-batch of the step that a page starts with; None where none was traced."""
    derived = next(item for item in group.kinds if item.kind == start_kind(facts))
    return footprint_on(derived.ranges[0].trace, device) if derived.ranges else None


def _group(asked: AskedJob, device: Device, sharing: Sequence[Device], worlds: Sequence[int]) -> CardGroup:
    """Steps on a card and on those that share its traces; without ``worlds``, the step that a page starts with."""
    facts, steps = asked.facts, _Steps(asked, device, sharing)
    kinds = [
        StepKind(checkpoint=checkpoint, accumulated=accumulated, world=world, length=length)
        for world in worlds
        for checkpoint in (("none", "all") if facts.every else ("none",))
        for accumulated in ((False, True) if facts.precision else (False,))  # a script accumulates as it is written
        for length in traced_lengths(facts)
    ] or [start_kind(facts)]
    most = {length: steps.most_items(length, kinds) for length in {kind.length: None for kind in kinds}}
    derived = tuple(steps.derived(kind, most[kind.length]) for kind in kinds)
    return CardGroup(cards=tuple(steps.sharing_cards()), kinds=derived)


class _Steps:
    """The traced steps of a job on one card."""

    def __init__(self, asked: AskedJob, device: Device, sharing: Sequence[Device]) -> None:
        self._asked, self._device, self._sharing = asked, device, sharing
        self._questions: list[TracedQuestion] = []
        self._limits: dict[StepKind, int] = {}
        self._changes: tuple[int, ...] = ()
        """Sizes from which on another step is made, of the kinds so far."""
        """The most events of a step of each kind: far more than those of the first that was traced."""
        self._trace = cache(self._traced)

    def _traced(self, kind: StepKind, items: int) -> Trace | str:
        """The trace that a card's allocator replays, or what the job's code raised."""
        modes: dict[str, Any] = {"none": {}, "all": self._asked.facts.every}
        several: dict[str, Any] = {"micro_batches": 2} if kind.accumulated else {}
        ranks: dict[str, Any] = {"engine": "ddp", "world": kind.world} if kind.world > 1 else {}
        try:
            with most_events(self._limits.get(kind, sys.maxsize)):
                question = self._asked.question(
                    Shape(items=items, length=kind.length), self._device, derive=False,
                    checkpointing=modes[kind.checkpoint], **several, **ranks,
                )  # fmt: skip
        except Exception as error:  # the job's code is the user's: sizes that it refuses are not derived
            return describe(error)
        self._questions.append(question)
        (trace,) = question.traces.values()
        self._limits.setdefault(kind, far_more_than(len(trace.kind)))
        return with_third_window(trace)

    def most_items(self, length: int | None, kinds: Sequence[StepKind]) -> int:
        """Items that no card of the group holds, by the line through two steps that need least memory."""
        checkpoint = max((kind.checkpoint for kind in kinds), key=("none", "all").index)
        kind = StepKind(checkpoint=checkpoint, accumulated=False, world=1, length=length)
        bound = min(LARGEST, MOST // (length or 1))
        low, high = self._trace(kind, 2), self._trace(kind, 4)
        if isinstance(low, str) or isinstance(high, str):
            return 4
        limit = max(card.usable_bytes or 0 for card in self.sharing_cards()) * BEYOND

        def needs(more: int) -> int:
            trace = interpolated(low, high, more / 2)
            if trace is None:
                return int(limit) + 1
            return max(need_on(trace, self._device).process_bytes.values())

        more, _ = largest_size(needs, int(limit), most=bound)
        return max(min(unlike_size(2 + (more or 1)), bound), 4)

    def sharing_cards(self) -> list[Device]:
        """Cards for which every trace so far holds to the byte; the card itself first."""
        others = [card for card in self._sharing if card.key != self._device.key]
        return [self._device, *(card for card in others if all(_is_same_on(card, each) for each in self._questions))]

    def derived(self, kind: StepKind, most: int) -> DerivedKind:
        """The ranges of items up to ``most`` in which a kind of step is derived."""
        ranges = derived_ranges(lambda items: self._trace(kind, items), most, self._changes)
        self._changes = tuple({*self._changes, *changes_of(ranges)})
        answers = [self._trace(kind, items) for items in (1, 2, most)]
        refused = next((answer for answer in answers if isinstance(answer, str)), "")
        return DerivedKind(kind=kind, ranges=tuple(ranges), refused=refused)


def _is_same_on(card: Device, question: TracedQuestion) -> bool:
    return holds_for(question, card) and question_on(question, card) is question
