"""The units of an epoch, which the job's data set is asked for; kept while what it read is as it was."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any

from memfit.errors import describe
from memfit.job import Job
from memfit.planner.asked_job import AskedJob
from memfit.planner.dependencies import data_still_hold, recorded_data

EPOCH = "epoch"
"""The name of the answer that is kept."""
MOST_READS = 20_000
"""Files and folders up to which an answer is kept: each is looked at before the answer is used again."""


class EpochUnits:
    """A context with the units in a job's data set. They are kept where they are known, or the job has no data set.

    Where they are not, and another process has the job loaded, that one begins to count them.
    """

    def __init__(self, asked: AskedJob) -> None:
        self._asked, self._open = asked, ExitStack()
        self._elsewhere = asked.begin_epoch_count() if self._known() is None else None
        if self._elsewhere is not None:
            self._open.enter_context(self._elsewhere)

    def __enter__(self) -> EpochUnits:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @cached_property
    def answer(self) -> tuple[int | None, str]:
        """(units, why they are unknown); waits for them."""
        if self._elsewhere is not None:
            with suppress(OSError, EOFError, ValueError):
                self._elsewhere.is_kept()
        if self._asked.may_be_kept_now:
            self._asked.look_again()
        known = self._known()
        return (known["units"], known["why"]) if known is not None else self._counted()

    def _known(self) -> dict[str, Any] | None:
        known: dict[str, Any] | None = self._asked.remembered(EPOCH)
        return known if known is not None and data_still_hold(known["data"]) else None

    def _counted(self) -> tuple[int | None, str]:
        job = self._asked.job
        with recorded_data() as data:
            units, why = _units_of_an_epoch(job)
        has_none = type(job).dataset is Job.dataset
        if (units is not None or has_none) and len(data.files) + len(data.folders) <= MOST_READS:
            self._asked.remember(EPOCH, {"units": units, "why": why, "data": data.marks()})
        return units, why


def _units_of_an_epoch(job: Job) -> tuple[int | None, str]:
    try:
        lengths = job.lengths()
        if lengths is None and job.longest is not None:
            return None, "the job has a longest, and no lengths() of its samples"
        return (len(job.dataset()) if lengths is None else sum(int(length) for length in lengths)), ""
    except Exception as error:  # the data set may lie on another machine
        return None, f"the job's data set cannot be read here: {describe(error)}"
