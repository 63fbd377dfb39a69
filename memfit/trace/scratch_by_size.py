"""Scratch of the calls of larger steps, from smaller steps of the same job.

A call of a large step takes as long to measure as the step takes to run. Most calls cannot make a peak, however: other
tensors need more at another time. Where a call's scratch lies on a line through three smaller steps, and the estimate
leaves it far below its phase's peak, it is not measured. Every call near a peak is, so that a footprint is the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from memfit.events import ALLOCATE, FREE, Trace
from memfit.trace.operator_scratch import Call, Key, measure

if TYPE_CHECKING:
    from collections.abc import Mapping

STEPS = 3
"""Smaller steps whose scratch has to lie on a line."""
LEAST = 2
"""A step is at least this multiple of the largest of them: one that is near is measured, and serves larger steps."""
FARTHEST = 16
"""A step is at most this multiple of the largest of them."""
ERROR = 2
"""A call is measured where this multiple of its estimate could make a peak."""
NEAR = 8
"""A call is measured where one over this of the peak, as scratch, could make a peak."""


@dataclass
class ScratchBySize:
    """The calls of one job's steps that differ in their items alone, by (rank, items)."""

    _calls: dict[tuple[int, int], list[Call]] = field(default_factory=dict)

    def estimates(self, rank: int, items: int, trace: Trace, calls: Sequence[Call]) -> Mapping[Key, int]:
        """Bytes of the calls that need no measurement, at least 0. Where all need one, they serve larger steps.

        Args:
            trace: of the step, without scratch.
        """
        estimates = self._estimates(rank, items, trace, calls)
        if not estimates:
            self._calls[rank, items] = list(calls)
        return estimates

    def _estimates(self, rank: int, items: int, trace: Trace, calls: Sequence[Call]) -> Mapping[Key, int]:
        smaller = sorted(size for owner, size in self._calls if owner == rank and LEAST * size <= items)[-STEPS:]
        if len(smaller) < STEPS or items > FARTHEST * smaller[-1]:
            return {}
        steps = [self._calls[rank, size] for size in smaller]
        if any(_operators(step) != _operators(calls) for step in steps):
            return {}
        spare = _spare_bytes(trace, [position for position, _, _ in calls])
        by_key: dict[Key, int | None] = {}
        for (_, _, key), room, *sizes in zip(calls, spare, *map(_scratch, steps), strict=True):
            if isinstance(key, str):
                estimate = _on_line(smaller, sizes, items)
                is_far = estimate is not None and ERROR * estimate <= room
                by_key[key] = estimate if is_far and by_key.get(key, estimate) == estimate else None
        return {key: estimate for key, estimate in by_key.items() if estimate is not None}


def _operators(calls: Sequence[Call]) -> list[str]:
    return [json.loads(key)[0] if isinstance(key, str) else "" for _, _, key in calls]


def _scratch(calls: Sequence[Call]) -> list[int | None]:
    sizes, _ = measure({key for _, _, key in calls if isinstance(key, str)})
    return [sizes.get(key) if isinstance(key, str) else None for _, _, key in calls]


def _on_line(sizes: Sequence[int], scratch: Sequence[int | None], wanted: int) -> int | None:
    """Bytes at a size on the line through all points; None where they lie on none, or it leads below 0."""
    points = [(size, nbytes) for size, nbytes in zip(sizes, scratch, strict=True) if nbytes is not None]
    if len(points) < len(sizes):
        return None
    (first, low), (last, high) = points[0], points[-1]
    if any((nbytes - low) * (last - first) != (high - low) * (size - first) for size, nbytes in points):
        return None
    estimate = low - (low - high) * (wanted - first) // (last - first)
    return estimate if estimate >= 0 else None


def _spare_bytes(trace: Trace, positions: Sequence[int]) -> list[int]:
    """For each position, by how much its tensors are below the peak of its phase; -1 where that is near the peak."""
    sign = (trace.kind == ALLOCATE).astype(np.int64) - (trace.kind == FREE)
    live = np.cumsum(sign * trace.nbytes[trace.storage])
    before = np.concatenate([[0], live])
    spare = np.full(len(before), -1, np.int64)
    edges = sorted({0, len(live), *(edge for _, start, stop in trace.phases for edge in (start, stop))})
    for start, stop in pairwise(edges):
        part = slice(start + 1, stop + 1)
        peak = int(before[part].max(initial=0))
        room = peak - before[part]
        spare[part] = np.where(room * NEAR >= peak, room, -1)
    return [int(spare[min(position, len(live))]) for position in positions]
