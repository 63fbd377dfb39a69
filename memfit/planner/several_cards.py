"""The same question for several cards: a second core replays half of their traces."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memfit.device.hardware.catalogue import Device
from memfit.footprint import Footprint
from memfit.forked_process import NoResultError, has_core_for_copy, with_copy
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.prediction import Prediction, TracedQuestion, answer, footprints_of

WORTH_A_COPY = 200_000
"""Events to replay from which on a second core is asked: 0.1 s of a core, where the copy takes 0.02 s."""


@dataclass(frozen=True, kw_only=True)
class _Card:
    """A card's question, and the seconds that it took."""

    device: Device
    question: TracedQuestion
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Replayed:
    """Footprints by rank, and the seconds that they took."""

    footprints: Mapping[int, Footprint]
    seconds: float


def predict_each(asked: AskedJob, shape: Shape, devices: Sequence[Device], **choices: Any) -> list[Prediction]:
    """What ``asked.predict`` gives for each device, in their order; arguments as there."""
    cards = []
    for device in devices:
        begin = time.perf_counter()
        question = asked.question(shape, device, **choices)
        cards.append(_Card(device=device, question=question, seconds=time.perf_counter() - begin))
    return [
        replace(
            answer(card.question, asked.name, card.device, footprints=replayed.footprints),
            seconds=card.seconds + replayed.seconds,
        )
        for card, replayed in zip(cards, _replay_each(cards), strict=True)
    ]


def _replay_each(cards: Sequence[_Card]) -> list[_Replayed]:
    """The replays of every card, in order."""
    alike: dict[str, list[int]] = {}
    for number, card in enumerate(cards):
        alike.setdefault(_digest(card.question), []).append(number)
    groups = sorted(alike.values(), key=len, reverse=True)
    halves = [[number for group in groups[first::2] for number in group] for first in (0, 1)]
    replayed: dict[int, _Replayed] = {}

    def replay(numbers: Sequence[int]) -> dict[int, _Replayed]:
        replayed.update({number: _replay(cards[number]) for number in numbers})
        return replayed

    events = sum(_events(cards[group[0]].question) for group in groups)
    if len(groups) > 1 and events >= WORTH_A_COPY and has_core_for_copy():
        with suppress(OSError, NoResultError):
            replayed |= with_copy(partial(replay, halves[0]), partial(replay, halves[1]))
    return [replayed[number] if number in replayed else _replay(card) for number, card in enumerate(cards)]


def _replay(card: _Card) -> _Replayed:
    begin = time.perf_counter()
    footprints = footprints_of(card.question, card.device)
    return _Replayed(footprints=footprints, seconds=time.perf_counter() - begin)


def _events(question: TracedQuestion) -> int:
    return sum(len(trace.kind) for trace in question.traces.values())


def _digest(question: TracedQuestion) -> str:
    """What is the same for cards that share their replays without a limit (``memfit.replay.replay``)."""
    digest = hashlib.blake2b()
    for trace in question.traces.values():
        for column in (trace.storage, trace.nbytes):
            digest.update(column.tobytes())
    return digest.hexdigest()
