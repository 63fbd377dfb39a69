"""Ways to split a global batch into micro-batches, and those of them that the nets refuse."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.errors import InputError
from memfit.geometry import Geometry, least_micro_batch, shape_of, split
from memfit.job import Job
from memfit.planner.search.traced_job import TracedJob

RANKED = 24
"""Micro-batches that are ranked, at most."""


def geometries(
    job: Job, global_batch: int, ranks: int, devices_each: int = 1, fixed: int | None = None
) -> list[Geometry]:
    """Ways to split a global batch, the largest micro-batch first.

    Args:
        ranks: those with samples of their own, each of so many devices.
        fixed: the micro-batch; None: to be chosen.
    """
    share, smallest = -(-global_batch // ranks), max(job.longest or 1, least_micro_batch(global_batch, ranks))
    return [split(global_batch, micro, job.unit, ranks, devices_each) for micro in sizes(share, smallest, fixed)]


def without_single_items(
    traced_job: TracedJob, split: list[Geometry], modes: Mapping[str, str]
) -> tuple[list[Geometry], str]:
    """Ways to split a batch without those that have a micro-batch of one item, where a net normalises over the batch
    and refuses it; and what it raises then, empty where it does not.

    Raises:
        InputError: no other way is left.
    """
    job = traced_job.job
    single = [g for g in split if min(map(min, g.micro_batches)) == 1]
    if not single or job.longest is not None or not traced_job.normalises_over_batch():
        return split, ""
    try:
        traced_job.trace(shape_of(job, 1), modes, accumulated=True)
    except ValueError as error:
        rest = [g for g in split if g not in single]
        if not rest:
            sizes_of = single[0].arithmetic()
            write = "choose --global-batch and --micro-batch so that every micro-batch holds two or more"
            raise InputError(f"micro-batches of {sizes_of}", f"the nets refuse one item: {error}", write) from error
        return rest, str(error)
    return split, ""


def sizes(share: int, smallest: int, fixed: int | None) -> list[int]:
    """Micro-batches that split a rank's share into as even parts as can be, from all of it to the smallest."""
    if fixed is not None:
        return [min(fixed, share)]
    smallest = min(smallest, share)
    candidates: list[int] = []
    count = 1
    while True:
        size = max(-(-share // count), smallest)
        if not candidates or size < candidates[-1]:
            candidates.append(size)
        if size == smallest or len(candidates) >= RANKED:
            return candidates if candidates[-1] == smallest else [*candidates, smallest]
        count = count + 1 if count < RANKED // 2 else -(-count * 5 // 4)
