"""The units of an epoch, for which the job's data set is asked before anybody waits for it."""

from __future__ import annotations

from contextlib import nullcontext, suppress

from memfit.cli.reading_only import reading_only
from memfit.device.hardware.process_limits import available_bytes
from memfit.planner.asked_job import AskedJob
from memfit.planner.epoch_units import EPOCH, EpochUnits

UNASKED = 15
"""Seconds of the processor that a person's data set may take where nobody waits for it."""
ASKED = 60
"""Where somebody does, who then asks it."""


def count_epoch(asked: AskedJob, seconds: float) -> bool:
    """Counts them and keeps the answer; False where it is not known. A person's own data set may only read: where it
    does more, or takes longer, nothing is kept.

    Args:
        seconds: of the processor.
    """
    asked.keep()
    is_own = type(asked.job).__module__.startswith("memfit.jobs.")
    guard = reading_only(seconds=seconds, more_bytes=available_bytes() // 2)
    with suppress(Exception), nullcontext() if is_own else guard, EpochUnits(asked) as epoch:
        _ = epoch.answer
    asked.keep()
    return asked.remembered(EPOCH) is not None and not asked.is_outdated
