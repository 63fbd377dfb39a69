"""Prediction: a job's Footprint on a device, made without the device."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from memfit.apply.build_nets import nets_of
from memfit.blocks import candidates
from memfit.device.hardware.catalogue import Device, nccl_bytes
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.engine.zero_partition import most_gradients
from memfit.errors import InputError
from memfit.events import Trace
from memfit.footprint import Footprint
from memfit.job import Job, Nets, Shape
from memfit.plan import Plan
from memfit.replay import footprint
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.cpu_allocator import CpuAllocator
from memfit.replay.margins import margin_of
from memfit.replay.replay import Outside
from memfit.trace.extra_window import with_third_window
from memfit.trace.step import Tracing, trace_job
from memfit.trace.tracer import Tracer

BINDING_RANK = 0
"""The rank that needs most, of ranks that run the same micro-batches: shards are cut by ceiling division, so that no
rank holds a larger part of any tensor, and of whole replicas it alone keeps the average of the weights."""


@dataclass(frozen=True, kw_only=True)
class NetSize:
    """Counts of one net: parameters and parameter tensors, and how many of them are trained."""

    name: str
    parameters: int
    trainable: int
    tensors: int
    trainable_tensors: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What ``memfit predict`` answers."""

    job: str
    settings: dict[str, Any]
    shape: Shape
    micro_batch: int
    unit: str
    device: Device
    nets: tuple[NetSize, ...]
    footprint: Footprint
    trace: Trace
    checkpointing: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Time that the prediction took."""
    engine: str = "single"
    world: int = 1
    rank: int = 0
    """The rank that ``footprint`` is of: the one that was asked for, or the one that needs most."""


def predict(
    job: Job,
    name: str,
    shape: Shape,
    device: Device,
    *,
    micro_batches: int = 1,
    checkpointing: Mapping[str, str] | None = None,
    engine: str = "single",
    world: int = 1,
    rank: int | None = None,
    engine_choices: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
) -> Prediction:
    """Predicts one micro-batch shape of a job on a device.

    Args:
        name: what to call the job.
        micro_batches: micro-batches in a window; from two on, gradients are resident in the second forward.
        checkpointing: mode by module path; None: the job's own default.
        engine, engine_choices: how the nets are put onto ranks, as ``Tracing`` has them.
        world: ranks, each on such a device, each with such micro-batches.
        rank: which of them; None: the one that needs most.
        plan: where its optimizers' implementation and its room for validation and saving come from.

    Raises:
        InputError: a rank that is not there, several ranks on the engine of one, or a job that the engine cannot carry.
    """
    _check_ranks(engine, world, rank)
    begin = time.perf_counter()
    nets = plain_nets(job)
    modes = default_checkpointing(job, nets) if checkpointing is None else dict(checkpointing)
    how = Tracing(
        device=device, micro_batches=micro_batches, checkpointing=modes, engine=engine, world=world,
        engine_choices=engine_choices or {},
    )  # fmt: skip
    if plan is not None:
        how = replace(
            how, implementation=plan.implementation, validation=plan.validation, saving=plan.saving,
            optimizer_state=plan.optimizer_state, average=plan.average,
        )  # fmt: skip
    asked = binding_ranks(job, nets, engine, world) if rank is None else (rank,)
    traces = {one: trace_job(job, shape, replace(how, rank=one)) for one in asked}
    allocator = plan.allocator if plan is not None else "default"
    footprints = {one: footprint_on(trace, device, world, allocator) for one, trace in traces.items()}
    which = max(asked, key=lambda one: max(phase.process_bytes for phase in footprints[one].phases.values()))
    return Prediction(
        job=name,
        settings=job.settings(),
        shape=shape,
        micro_batch=shape.units,
        unit=job.unit,
        device=device,
        nets=net_sizes(nets),
        footprint=footprints[which],
        trace=traces[which],
        checkpointing=modes,
        engine=engine,
        world=world,
        rank=which,
        seconds=time.perf_counter() - begin,
    )


def binding_ranks(job: Job, nets: Nets, engine: str, world: int) -> tuple[int, ...]:
    """Ranks of which one needs most: ``BINDING_RANK``, under ZeRO's stages 1 and 2 or the one with most gradients."""
    if engine not in ("zero1", "zero2") or world == 1:
        return (BINDING_RANK,)
    groups = [group["params"] for optimizer in job.optimizers(nets).values() for group in optimizer.param_groups]
    most = most_gradients([[p.numel() for p in group if p.requires_grad] for group in groups], world)
    return tuple({BINDING_RANK: None, most: None})


def _check_ranks(engine: str, world: int, rank: int | None) -> None:
    check_fake_ranks(f"--world {world}", world)
    if engine == "single" and world > 1:
        raise InputError(f"--world {world}", "--engine single has one rank", "write --engine ddp or --engine fsdp2")
    if rank is not None and not 0 <= rank < world:
        raise InputError(f"--rank {rank}", f"there are ranks 0 to {world - 1}", f"write --rank {world - 1} or less")


def footprint_on(trace: Trace, device: Device, world: int = 1, allocator: str = "default") -> Footprint:
    """A trace replayed through the device's allocator, under its memory.

    Args:
        world: ranks; what their communicator holds lies outside of the allocator.
        allocator: how a card's allocator makes its segments, as a plan has it.

    Raises:
        InputError: the device's memory is not known.
    """
    if device.usable_bytes is None:
        raise InputError(f"device {device.key}", "its memory is not known", "give --memory SIZE")
    if not device.is_cuda:
        return footprint(trace, CpuAllocator, device.usable_bytes, device.usable_bytes)
    nccl = nccl_bytes(device) if world > 1 else (0, 0, 0)
    context = (device.context_low or 0, device.context_bytes or 0, device.context_high or 0)
    low, usual, high = (own + shared for own, shared in zip(context, nccl, strict=True))
    outside = Outside(bytes=usual, low=low, high=high)
    return footprint(
        with_third_window(trace),
        partial(CachingAllocator, config=AllocatorConfig(expandable_segments=allocator == "expandable_segments")),
        device.usable_bytes - outside.bytes,
        device.usable_bytes,
        outside,
        margin_of(trace.net_kind),
    )


def plain_nets(job: Job) -> Nets:
    """The job's nets without their bytes, for counting and for finding modules; no trace that is open sees them."""
    from memfit.device.virtual.library_patches import as_in_a_real_run
    from memfit.device.virtual.virtual_device import virtual_cpu
    from memfit.torch_compat import disable_current_modes

    with disable_current_modes(), virtual_cpu() as virtual, as_in_a_real_run(), Tracer(virtual).recording():
        nets: Nets = nets_of(job, virtual.device)
    return nets


def nets_and_readings(job: Job, setting: str) -> tuple[Nets, bool]:
    """``plain_nets``, and whether they depend on a setting: it is read while they are built."""
    read: list[str] = []

    class Watched(type(job)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in (setting, "settings", "__dict__"):
                read.append(name)
            return super().__getattribute__(name)

    watched = copy.copy(job)
    try:
        watched.__class__ = Watched
    except TypeError:
        return plain_nets(job), True
    return plain_nets(watched), bool(read)


def net_sizes(nets: Nets) -> tuple[NetSize, ...]:
    """Counts by net; a tensor that two modules share counts once."""
    sizes = []
    for name, net in nets.items():
        tensors = list(net.parameters())
        trained = [p for p in tensors if p.requires_grad]
        count = [sum(p.numel() for p in some) for some in (tensors, trained)]
        sizes.append(
            NetSize(
                name=name, parameters=count[0], trainable=count[1], tensors=len(tensors), trainable_tensors=len(trained)
            )
        )
    return tuple(sizes)


def checkpoint_all(job: Job, nets: Nets) -> dict[str, str]:
    """Every module that may be recomputed, recomputed in full."""
    return dict.fromkeys(candidates(job, nets), "full")


def default_checkpointing(job: Job, nets: Nets) -> dict[str, str]:
    """The job's own default: ``checkpoint`` none or all.

    Raises:
        InputError: another word.
    """
    if job.checkpoint == "none":
        return {}
    if job.checkpoint == "all":
        return checkpoint_all(job, nets)
    raise InputError(f"checkpoint={job.checkpoint}", "neither none nor all", "write checkpoint=none or checkpoint=all")


def with_precision(job: Job, precision: str | None) -> Job:
    """The same job in another precision; None: its own."""
    if precision is None:
        return job
    return type(job)(**{**job.settings(), "precision": precision})
