"""Traces for the next questions: other micro-batches of the step that was asked for, and the other cards.

A micro-batch between traced ones follows from them (``memfit.planner.step_range``), and a card that answers the same
facts shares a trace, so that a handful of traces answer for every micro-batch on the card and for every card.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.events import Trace
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_steps import derived_ranges
from memfit.planner.largest import items_beyond, sharing_cards
from memfit.planner.prediction import TracedQuestion, answer

PART = 2
"""Traces for later questions take at most so many times the processor's time that the answer took."""


def trace_ahead(asked: AskedJob, shape: Shape, device: Device, until: float, **choices: Any) -> None:
    """Traces the step of a question on the other cards, then what answers for other micro-batches on its card.

    What the job's code raises is left out: nobody asked for these steps.

    Args:
        shape, device, choices: the question that was answered, as of ``AskedJob.question``.
        until: the time of ``time.process_time`` at which no further trace begins.
    """
    if not device.is_cuda:
        return

    def traced(items: int, card: Device) -> TracedQuestion | None:
        if time.process_time() < until:
            with suppress(Exception):
                return asked.question(Shape(items=items, length=shape.length), card, **choices)
        return None

    first = traced(shape.items, device)
    if first is None:
        return
    known = sharing_cards(first)
    for card in catalogue().values():
        if card.is_cuda and card.usable_bytes is not None and card not in known:
            question = traced(shape.items, card)
            known += sharing_cards(question) if question is not None else []
    if (other := traced(_other(shape.items), device)) is not None:
        low, high = sorted((first, other), key=lambda question: question.shape.items)
        cards = (device, *sharing_cards(first))
        most = items_beyond(answer(low, asked.name, device), answer(high, asked.name, device), cards)
        derived_ranges(lambda items: _only_trace(traced(items, device)), most)


def _other(items: int) -> int:
    return 2 if items != 2 else 4


def _only_trace(question: TracedQuestion | None) -> Trace | str:
    return next(iter(question.traces.values())) if question is not None else "not traced"
