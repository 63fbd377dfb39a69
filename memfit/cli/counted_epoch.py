"""The units of an epoch, for which the job's data set is asked before anybody waits for it."""

from __future__ import annotations

from contextlib import nullcontext, suppress

from memfit.cli.reading_only import reading_only
from memfit.device.hardware.process_limits import available_bytes
from memfit.planner.asked_job import AskedJob
from memfit.planner.epoch_units import EPOCH, EpochUnits

SECONDS = 15
"""Of the processor, that a person's data set may take."""


def count_epoch(asked: AskedJob) -> bool:
    """Counts them and keeps the answer; False where it is not known. A person's own data set may only read, and not for
    long: where it does more, nothing is kept."""
    asked.keep()
    is_own = type(asked.job).__module__.startswith("memfit.jobs.")
    guard = reading_only(seconds=SECONDS, more_bytes=available_bytes() // 2)
    with suppress(Exception), nullcontext() if is_own else guard, EpochUnits(asked) as epoch:
        _ = epoch.answer
    asked.keep()
    return asked.remembered(EPOCH) is not None and not asked.is_outdated
