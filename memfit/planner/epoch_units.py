"""The units of an epoch, which the job's data set is asked for; kept while what it read is as it was."""

from __future__ import annotations

from memfit.errors import describe
from memfit.job import Job
from memfit.planner.asked_job import AskedJob
from memfit.planner.dependencies import data_still_hold, recorded_data

EPOCH = "epoch"
"""The name of the answer that is kept."""
MOST_READS = 20_000
"""Files and folders up to which an answer is kept: each is looked at before the answer is used again."""


def units_of_an_epoch(asked: AskedJob) -> tuple[int | None, str]:
    """(units in the job's data set, why they are unknown); kept where they are known, or the job has no data set."""
    known = asked.remembered(EPOCH)
    if known is not None and data_still_hold(known["data"]):
        return known["units"], known["why"]
    job = asked.job
    with recorded_data() as data:
        units, why = _units_of_an_epoch(job)
    has_none = type(job).dataset is Job.dataset
    if (units is not None or has_none) and len(data.files) + len(data.folders) <= MOST_READS:
        asked.remember(EPOCH, {"units": units, "why": why, "data": data.marks()})
    return units, why


def _units_of_an_epoch(job: Job) -> tuple[int | None, str]:
    try:
        lengths = job.lengths()
        if lengths is None and job.longest is not None:
            return None, "the job has a longest, and no lengths() of its samples"
        return (len(job.dataset()) if lengths is None else sum(int(length) for length in lengths)), ""
    except Exception as error:  # the data set may lie on another machine
        return None, f"the job's data set cannot be read here: {describe(error)}"
