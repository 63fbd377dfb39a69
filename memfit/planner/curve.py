"""Memory against micro-batch, for each way to recompute: one family of traces a policy, evaluated at many sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memfit.device.catalogue import Device
from memfit.geometry import shape_of
from memfit.job import Job
from memfit.planner.predict import checkpoint_all, default_checkpointing, footprint_on, plain_nets
from memfit.trace.step import Tracing, trace_family

POINTS = 8
_ENDLESS = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Process bytes, the most of all phases, at each micro-batch (in the job's units) under one policy."""

    policy: str
    micro_batches: tuple[int, ...]
    process_bytes: tuple[int, ...]


def policies(job: Job) -> dict[str, Mapping[str, str]]:
    """The job's own checkpointing, nothing recomputed and everything recomputed; ways that are the same come once."""
    nets = plain_nets(job)
    found: dict[str, Mapping[str, str]] = {"the job's own": default_checkpointing(job, nets)}
    for name, modes in (("nothing recomputed", {}), ("all recomputed", checkpoint_all(job, nets))):
        if modes not in found.values():
            found[name] = modes
    return found


def memory_curves(
    job: Job, device: Device, largest: int, *, accumulating: bool, more: Mapping[str, Mapping[str, str]] | None = None
) -> list[Curve]:
    """Curves up to ``largest`` units, without what operators allocate inside of themselves.

    Args:
        accumulating: whether gradients are there in a micro-batch's forward.
        more: further policies by name, modes by module path.
    """
    smallest = min(job.longest or 1, largest)
    sizes = tuple(sorted({round(smallest * (largest / smallest) ** (i / (POINTS - 1))) for i in range(POINTS)}))
    endless = replace(device, usable_bytes=_ENDLESS)
    curves = []
    for policy, modes in (policies(job) | dict(more or {})).items():
        how = Tracing(device=device, micro_batches=2 if accumulating else 1, checkpointing=modes)
        family = trace_family(job, how, shape_of(job, sizes[0]))
        found = [footprint_on(family.bound(shape_of(job, size)), endless) for size in sizes]
        bytes_ = tuple(one.phases[one.limiting_phase].process_bytes for one in found)
        curves.append(Curve(policy=policy, micro_batches=sizes, process_bytes=bytes_))
    return curves
