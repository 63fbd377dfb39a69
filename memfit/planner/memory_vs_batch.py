"""The curve: process bytes of a training step against the micro-batch, for each uniform policy."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.device.hardware.catalogue import Device
from memfit.geometry import shape_of
from memfit.job import Job
from memfit.planner.predict import default_checkpointing, plain_nets
from memfit.planner.search.candidate_search import CandidateSearch
from memfit.planner.search.layout import holds
from memfit.planner.search.traced_job import open_traced_job
from memfit.trace.step import Tracing

POINTS = 5
"""Micro-batches that are traced from the smallest to the largest, each about as many times the one before."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One micro-batch under one policy: forward and backward with accumulated gradients."""

    policy: str
    micro_batch: int
    process_bytes: int
    fits: bool


def memory_curve(job: Job, how: Tracing, device: Device, most: int, chosen: int) -> list[Point]:
    """The points of every policy, up to a micro-batch of ``most``; ``chosen`` is among them."""
    own = default_checkpointing(job, plain_nets(job))
    smallest = min(job.longest or 1, most)
    sizes = sizes_between(smallest, most, chosen)
    curve_points = []
    with open_traced_job(job, how, shape_of(job, smallest)) as traced_job:
        search = CandidateSearch(traced_job, device, most, 1)
        layout = traced_job.observed(shape_of(job, smallest), accumulated=True).layout
        blocks = [block.path for block in layout.blocks]
        able = [path for path in blocks if not holds(path, traced_job.overwritten)]
        policies = {
            "everything kept": {},
            "the job's own": own,
            "every block selective": dict.fromkeys(able, "selective"),
            "every block recomputed": dict.fromkeys(blocks, "full"),
        }
        if not own or own == policies["every block recomputed"]:
            del policies["the job's own"]
        for policy, modes in policies.items():
            for micro in sizes:
                takes = search.peak_of(traced_job.trace(shape_of(job, micro), modes, accumulated=True))
                curve_points.append(
                    Point(
                        policy=policy, micro_batch=micro, process_bytes=takes, fits=takes <= (device.usable_bytes or 0)
                    )
                )
    return curve_points


def sizes_between(smallest: int, most: int, chosen: int) -> list[int]:
    """Both ends and multiples of the smallest in between, as far apart as their logarithms allow; and ``chosen``."""
    steps = (smallest * round((most / smallest) ** (step / (POINTS - 1))) for step in range(POINTS - 1))
    return sorted({*steps, chosen, most})
