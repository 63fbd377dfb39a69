"""What a micro-batch of a shape costs a job in memory, from its trace: what the batch sampler packs by."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.batch.cost import PaddedCost, fit_cost
from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.geometry import shape_of
from memfit.job import Job, Shape
from memfit.planner.predict import default_checkpointing, footprint_on, plain_nets
from memfit.trace.step import Tracing, trace_family

ITEMS = (16, 32, 64)


def traced_cost(job: Job, device: Device, checkpointing: Mapping[str, str] | None = None) -> tuple[PaddedCost, float]:
    """(cost in bytes of padded units, fixed bytes) of training's peak: ``fixed + a·B·L + b·B·L²``.

    A sampler's budget on this device is ``device.usable_bytes - fixed``. Fitted to shapes of many items, where the
    activations and not the optimizer are the peak.

    Raises:
        InputError: the job's items have no length.
    """
    if job.longest is None:
        raise InputError(f"cost of {job.unit}", "the job's items have no length", "cap batches by their count")
    modes = default_checkpointing(job, plain_nets(job)) if checkpointing is None else checkpointing
    family = trace_family(job, Tracing(device=device, checkpointing=modes), shape_of(job, job.longest))
    lengths = sorted({max(job.longest * part // 128, 1) * 32 for part in (1, 2, 4)})
    shapes = [Shape(items=items, length=length) for items in ITEMS for length in lengths]
    peaks = [footprint_on(family.bound(shape), device).phases["train"].allocated_bytes for shape in shapes]
    return fit_cost(shapes, peaks)
