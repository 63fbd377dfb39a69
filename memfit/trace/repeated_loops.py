"""Loops of a validation whose turns do the same with memory, run for a few turns alone.

The first turn begins without what a turn leaves behind, the second has it, the last may be shorter. A loop that is
entered again for as many turns (denoising steps, once for each part of a video) leaves its second turn out too, if that
did, event by event, what the last one did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memfit.events import ALLOCATE
from memfit.trace.tracer import Tracer

Loop = tuple[Any, int, int]
"""The line that asked for a loop's turns, and how many."""


def traced_repeats(tracer: Tracer) -> Callable[[int], Iterable[int]]:
    """What ``Job.repeats`` is in the trace of one validation."""
    equal: set[Loop] = set()
    """Loops whose second turn did what the last one did."""

    def repeats(count: int) -> Iterable[int]:
        asked_by = sys._getframe(1)
        loop = (asked_by.f_code, asked_by.f_lineno, count)
        if count < 4:
            return range(count)
        return _as_before(count) if loop in equal else _compared(loop, count)

    def _as_before(count: int) -> Iterator[int]:
        yield 0
        row = len(tracer.op_rows)
        yield count - 1
        tracer.repeated.append((row, len(tracer.op_rows), count - 1))

    def _compared(loop: Loop, count: int) -> Iterator[int]:
        yield 0
        second, row = len(tracer.kind), len(tracer.op_rows)
        yield 1
        tracer.repeated.append((row, len(tracer.op_rows), count - 2))
        last = len(tracer.kind)
        yield count - 1
        end = len(tracer.kind)
        if last > second and _turn(tracer, second, last) == _turn(tracer, last, end):
            equal.add(loop)

    return repeats


def _turn(tracer: Tracer, start: int, end: int) -> list[tuple[int, int]]:
    """(kind, bytes) of every event of a turn: frees of earlier storages among them."""
    return [
        (kind, tracer.nbytes[storage] if kind in (ALLOCATE, -ALLOCATE) else 0)
        for kind, storage in zip(tracer.kind[start:end], tracer.storage[start:end], strict=True)
    ]
