"""Traces for the next questions: other micro-batches of the step that was asked for, and the other cards.

A micro-batch between traced ones follows from them (``memfit.planner.step_range``), and a card that answers the same
facts shares a trace, so that a handful of traces answer for every micro-batch on the card and for every card.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.events import Trace
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_steps import derived_ranges
from memfit.planner.largest import items_beyond, sharing_cards
from memfit.planner.prediction import TracedQuestion, answer
from memfit.trace.event_limit import far_more_than, most_events


def trace_ahead(asked: AskedJob, shape: Shape, device: Device, **choices: Any) -> list[Device]:
    """Traces what answers for other micro-batches on a question's card, then its step on the other cards; gives a card
    of each kind of kernels but its own.

    What the job's code raises is left out: nobody asked for these steps. Each trace is kept when it is made.

    Args:
        shape, device, choices: the question that was answered, as of ``AskedJob.question``.
    """
    if not device.is_cuda:
        return []

    def traced(items: int, card: Device) -> TracedQuestion | None:
        with suppress(Exception):
            question = asked.question(Shape(items=items, length=shape.length), card, **choices)
            asked.keep()
            return question
        return None

    first = traced(shape.items, device)
    if first is None:
        return []
    limit = far_more_than(max(len(trace.kind) for trace in first.traces.values()))
    known = sharing_cards(first)
    if (other := traced(_other(shape.items), device)) is not None:
        low, high = sorted((first, other), key=lambda question: question.shape.items)
        most = items_beyond(answer(low, asked.name, device), answer(high, asked.name, device), (device, *known))
        with most_events(limit):
            derived_ranges(lambda items: _only_trace(traced(items, device)), most)
    others = []
    for card in catalogue().values():
        if card.is_cuda and card.usable_bytes is not None and card not in known:
            others.append(card)
            question = traced(shape.items, card)
            known += sharing_cards(question) if question is not None else []
    return others


def _other(items: int) -> int:
    return 2 if items != 2 else 4


def _only_trace(question: TracedQuestion | None) -> Trace | str:
    return next(iter(question.traces.values())) if question is not None else "not traced"
