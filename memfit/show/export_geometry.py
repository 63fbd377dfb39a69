"""A plan's window in equal micro-batches, as other tools count it."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.job import Job
from memfit.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ExportGeometry:
    """A window in equal micro-batches, as these tools count it: global batch = world x accumulation x micro-batch."""

    world: int
    micro_batch: int
    accumulation: int
    counts: str
    """What is counted: samples, or whole micro-batches where the samples' lengths vary."""
    sample_units: int = 1
    """The plan's units in one of what is counted, where that is samples: their common length."""

    @property
    def global_batch(self) -> int:
        """The product of the three numbers."""
        return self.world * self.micro_batch * self.accumulation


def equal(plan: Plan, job: Job) -> ExportGeometry:
    """Equal micro-batches that make up the global batch, none larger than the plan's: of all, the fewest.

    Where a rank's share is not a whole number, the share of the rank with the most; where samples are of one length,
    they are counted; where their lengths vary, each micro-batch counts as one.
    """
    world = len(plan.micro_batches)
    length = 1 if job.longest is None else _one_length(job)
    if length is None or any(size % length for rank in plan.micro_batches for size in rank):
        count = max(len(rank) for rank in plan.micro_batches)
        return ExportGeometry(world=world, micro_batch=1, accumulation=count, counts="micro-batches")
    share = max(sum(rank) for rank in plan.micro_batches) // length
    micro = next(size for size in range(min(plan.micro_batch // length, share), 0, -1) if share % size == 0)
    return ExportGeometry(
        world=world, micro_batch=micro, accumulation=share // micro, counts="samples", sample_units=length
    )


def _one_length(job: Job) -> int | None:
    """The length of every sample of the data set; None where lengths vary or are not known."""
    lengths = job.lengths()
    distinct = set() if lengths is None else {int(length) for length in lengths}
    return distinct.pop() if len(distinct) == 1 else None
