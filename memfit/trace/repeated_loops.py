"""Loops of a validation whose turns do the same with memory, run for a few turns alone.

The first turn begins without what a turn leaves behind, the second has it, the last may be shorter. A loop that is
entered again (denoising steps, once for each part of a video; any loop under the next policy) leaves its second turn
out too, if that did, event by event, what the last one did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memfit.events import ALLOCATE
from memfit.trace.tracer import Tracer

Place = tuple[Any, int]
"""The line that asked for a loop's turns."""


def traced_repeats(tracer: Tracer, equal: set[Place]) -> Callable[[int], Iterable[int]]:
    """What ``Job.repeats`` is in a trace.

    Args:
        equal: loops whose second turn did what the last one did; those that are found are added.
    """

    def repeats(count: int) -> Iterable[int]:
        asked_by = sys._getframe(1)
        place = (asked_by.f_code, asked_by.f_lineno)
        if count < 4:
            return range(count)
        return _as_before(count) if place in equal else _compared(place, count)

    def _as_before(count: int) -> Iterator[int]:
        yield 0
        row = len(tracer.op_rows)
        yield count - 1
        tracer.repeated.append((row, len(tracer.op_rows), count - 1))

    def _compared(place: Place, count: int) -> Iterator[int]:
        yield 0
        second, row = len(tracer.kind), len(tracer.op_rows)
        yield 1
        tracer.repeated.append((row, len(tracer.op_rows), count - 2))
        last = len(tracer.kind)
        yield count - 1
        end = len(tracer.kind)
        if last > second and _turn(tracer, second, last) == _turn(tracer, last, end):
            equal.add(place)

    return repeats


def _turn(tracer: Tracer, start: int, end: int) -> list[tuple[int, int]]:
    """(kind, bytes) of every event of a turn: frees of earlier storages among them."""
    return [
        (kind, tracer.nbytes[storage] if kind in (ALLOCATE, -ALLOCATE) else 0)
        for kind, storage in zip(tracer.kind[start:end], tracer.storage[start:end], strict=True)
    ]
