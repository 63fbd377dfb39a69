"""Traces for the next questions: other micro-batches of the step that was asked for, and the other cards.

A micro-batch between traced ones follows from them (``memfit.planner.step_range``), and a card that answers the same
facts shares a trace, so that a handful of traces answer for every micro-batch on the card and for every card.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.events import Trace
from memfit.geometry import MOST
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_ranges import changes_of, derived_ranges
from memfit.planner.largest import items_beyond, sharing_cards
from memfit.planner.prediction import TracedQuestion, answer
from memfit.planner.step_range import unlike_size
from memfit.trace.event_limit import far_more_than, most_events

AMPERE = (8, 0)
"""The compute capability from which on bf16 and flash attention are there: kernels differ most on its two sides."""


class AheadTraces:
    """Traces that nobody asked for yet: what the job's code raises is left out, and each is kept when it is made.

    Args:
        goes_on: called before each trace; False: nothing more is traced.
    """

    def __init__(self, asked: AskedJob, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._asked, self._goes_on = asked, goes_on
        self._changes: tuple[int, ...] = ()
        """Items from which on another step is made, of the steps so far."""

    def trace_sizes(self, shape: Shape, device: Device, *, times: int = 1, **choices: Any) -> None:
        """Traces what answers for every micro-batch of a question on its card.

        Args:
            shape, device, choices: as of ``AskedJob.question``.
            times: how often as many items as no card holds.
        """
        first = self._traced(shape, device, choices) if device.is_cuda else None
        if first is None:
            return
        other = self._traced(_other_size(shape), device, choices)
        if other is None:
            return
        low, high = sorted((first, other), key=lambda question: question.shape.items)
        cards = (device, *sharing_cards(first))
        most = items_beyond(answer(low, self._asked.name, device), answer(high, self._asked.name, device), cards)
        most = max(most, min(unlike_size(times * most), MOST // (shape.length or 1)))

        def trace_at(items: int) -> Trace | str:
            question = self._traced(Shape(items=items, length=shape.length), device, choices)
            return next(iter(question.traces.values())) if question is not None else "not traced"

        with most_events(far_more_than(max(len(trace.kind) for trace in first.traces.values()))):
            ranges = derived_ranges(trace_at, most, self._changes)
        self._changes = tuple(sorted({*self._changes, *changes_of(ranges)}))

    def trace_cards(self, shape: Shape, device: Device, **choices: Any) -> list[Device]:
        """Traces a question's step on the other cards; gives a card of each kind of kernels but its own.

        Args:
            shape, device, choices: as of ``AskedJob.question``.
        """
        first = self._traced(shape, device, choices) if device.is_cuda else None
        if first is None:
            return []
        known, others = sharing_cards(first), []
        for card in catalogue().values():
            if card.is_cuda and card.usable_bytes is not None and card not in known:
                others.append(card)
                question = self._traced(shape, card, choices)
                known += sharing_cards(question) if question is not None else []
        return others

    def trace_meanwhile(self, shape: Shape, device: Device, **choices: Any) -> None:
        """Traces while another process traces a question's step, so that nothing is known of what it asks of a card.

        Cards on the other side of ``AMPERE`` come first: most steps that ask something ask that. Then comes another
        micro-batch: most of the cards that are left share the trace that is being made.

        Args:
            shape, device, choices: as of ``AskedJob.question``.
        """
        known, is_sized = [device], False
        cards = [card for card in catalogue().values() if card.is_cuda and card.usable_bytes is not None]
        for card in sorted(cards, key=lambda card: _likeness(card, device)):
            if not is_sized and _is_newer(card) == _is_newer(device):
                is_sized = True
                self._traced(_other_size(shape), device, choices)
            if card not in known:
                self._asked.look_again()
                question = self._traced(shape, card, choices)
                if question is None:
                    return
                known += sharing_cards(question)

    def _traced(self, shape: Shape, device: Device, choices: dict[str, Any]) -> TracedQuestion | None:
        if not self._goes_on():
            return None
        with suppress(Exception):
            question = self._asked.question(shape, device, **choices)
            self._asked.keep()
            return question
        return None


def _other_size(shape: Shape) -> Shape:
    """The micro-batch that is traced beside another one."""
    return Shape(items=2 if shape.items != 2 else 4, length=shape.length)


def _is_newer(card: Device) -> bool:
    return (card.compute_capability or (0, 0)) >= AMPERE


def _likeness(card: Device, other: Device) -> tuple[bool, bool]:
    """Of cards that may run other kernels, the one that surely has some comes first."""
    major, other_major = ((device.compute_capability or (0, 0))[0] for device in (card, other))
    return _is_newer(card) == _is_newer(other), major == other_major
