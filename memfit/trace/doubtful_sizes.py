"""Integers that only a run can answer: which of them decide sizes, found by another trace with another answer.

A trace answers 0 for an integer that it does not know (a length), 1 for a count of hits, and of the card's memory that
it is empty. Where the same step, answered one more and that the card is full, makes the same events of the same bytes,
no integer is a size, and nothing need be said of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from memfit.device.virtual.assumptions import DOUBT, MEMORY_DOUBT, unknown_integers
from memfit.events import Trace

_decides: dict[tuple[type, str], bool] = {}
"""By the job's class and the line that says it, whether an integer decides sizes; known within this process."""


def without_other_numbers(trace: Trace, job: type, again: Callable[[], Trace]) -> Trace:
    """The trace without the doubts about integers that decide no size.

    Args:
        job: the job's class.
        again: traces the same once more.
    """
    doubts = [line for line in trace.assumed if line.endswith((DOUBT, MEMORY_DOUBT))]
    if any((job, line) not in _decides for line in doubts):
        differs = _differs(trace, again)
        _decides.update({(job, line): differs for line in doubts})
    kept = tuple(line for line in trace.assumed if _decides.get((job, line), True))
    return replace(trace, assumed=kept) if len(kept) < len(trace.assumed) else trace


def _differs(trace: Trace, again: Callable[[], Trace]) -> bool:
    """Whether another answer makes other events, or ends in an error."""
    try:
        with unknown_integers(1):
            other = again()
    except Exception:
        return True
    return not all(
        np.array_equal(getattr(trace, column), getattr(other, column)) for column in ("kind", "storage", "nbytes")
    )
