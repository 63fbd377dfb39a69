"""Tells from readings of memory, step by step, whether it grew (a leak) or one step needed far more than the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from memfit.explain.evidence import StepGrowth
from memfit.sizes import format_size
from memfit.train.recovery.memory_growth import POINTS, MemoryGrowth

SETTLED = 2
"""Readings at the beginning that do not count: the first steps make gradients and the optimizer's state."""
SPIKE = 1.2
"""A step is a spike where it needs so many times the median of the others."""
LEAST_GROWTH = 0.02
"""Growth that is named, as a part of what was held at the beginning."""


def growth_of(readings: Sequence[tuple[int, int]], unit: str = "step", holder: str | None = None) -> StepGrowth | None:
    """Steady growth over (step, bytes) readings, the rule of ``memfit run``; None where there is none.

    Of many readings, the least of each of ``POINTS`` parts is compared: what is held from step to step.
    """
    series = MemoryGrowth()
    settled = readings[SETTLED:] if len(readings) > 8 + SETTLED else readings
    parts = min(len(settled), POINTS)
    for part in range(parts):
        step, nbytes = min(
            settled[part * len(settled) // parts : (part + 1) * len(settled) // parts], key=lambda reading: reading[1]
        )
        series.note(step, nbytes)
    growth = series.steady()
    if growth is None or growth.bytes < growth.begin * LEAST_GROWTH:
        return None
    return StepGrowth(
        first=growth.first, last=growth.last, begin=growth.begin, end=growth.end, unit=unit, holder=holder
    )  # fmt: skip


def spike_of(readings: Sequence[tuple[int, int]], unit: str = "step") -> str | None:
    """The step that needed far more than the others, in words; None where none did."""
    settled = readings[SETTLED:]
    if len(settled) < 4:
        return None
    step, most = max(settled, key=lambda reading: reading[1])
    usual = median(nbytes for _, nbytes in settled)
    if most < SPIKE * usual:
        return None
    return f"{unit} {step} needed {format_size(most)}, and half of the {unit}s at most {format_size(usual)}"
