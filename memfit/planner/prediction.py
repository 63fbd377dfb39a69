"""Predictions without torch: what one question to a job traces, and its Footprint on any device."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from memfit.device.hardware.catalogue import Device, nccl_bytes
from memfit.device.virtual.card_rules import card_facts
from memfit.errors import InputError
from memfit.events import Trace
from memfit.footprint import Footprint
from memfit.job import Shape
from memfit.mesh import communicators
from memfit.planner.cpu_margin import cpu_margin_bytes
from memfit.planner.pipeline.stage_figures import StageFigures, with_bytes
from memfit.planner.step_range import trace_between
from memfit.replay import footprint
from memfit.replay.allocator_config import AllocatorConfig, takes_youngest
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.cpu_allocator import CpuAllocator
from memfit.replay.margins import margin_of
from memfit.replay.replay import Allocator, Need, Outside, need
from memfit.trace.attention_kernels import with_attention_of
from memfit.trace.card_calls import trace_on, without_card_scratch
from memfit.trace.cublas_workspaces import with_workspaces_of
from memfit.trace.extra_window import with_third_window


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
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Ranks by dimension; empty where all are in the one that the engine is for."""
    rank_reason: str = ""
    """Why no rank of a mesh needs more than this one; empty without a mesh, and for a rank that was asked for."""
    stages: tuple[StageFigures, ...] = ()
    """Of a pipeline, with the bytes of the ranks that were traced; empty without one."""
    not_validated: tuple[str, ...] = ()
    """What the bytes rest on where no run with it was measured, such as compiled code: a line for each part."""


@dataclass(frozen=True, kw_only=True)
class TracedQuestion:
    """What a question to a job gives before a device's memory is known: a Prediction without its Footprint."""

    settings: dict[str, Any]
    shape: Shape
    unit: str
    nets: tuple[NetSize, ...]
    checkpointing: Mapping[str, str]
    engine: str
    world: int
    traces: Mapping[int, Trace]
    """Traces by rank, of the ranks of which one needs most."""
    allocator: str
    facts: Mapping[str, Any]
    """What the traces read of the device: they hold for every device with the same facts, but for what libraries take
    within calls and for cuBLAS's workspaces (``question_on``)."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    rank_reason: str = ""
    stages: tuple[StageFigures, ...] = ()
    not_validated: tuple[str, ...] = ()


def device_facts(device: Device, read: Collection[str]) -> dict[str, Any]:
    """Facts of a device: of a card those that a trace asked for, of a CPU what its workspaces depend on."""
    if not device.is_cuda:
        return {"cpu": [os.cpu_count(), os.environ.get("OMP_NUM_THREADS", "")]}
    return card_facts(device, read)


def holds_for(question: TracedQuestion, device: Device) -> bool:
    """Whether ``question_on`` gives a question's traces on this device."""
    return dict(question.facts) == device_facts(device, question.facts.keys() - {"cpu"})


def question_on(question: TracedQuestion, device: Device) -> TracedQuestion:
    """A question that holds for a device, with its traces there. One whose attention became cuDNN's holds for cards
    that prefer that alone."""
    shared = shared_on(question, device)
    traces = {rank: with_attention_of(trace, device) for rank, trace in shared.traces.items()}
    if all(trace is shared.traces[rank] for rank, trace in traces.items()):
        return shared
    return replace(shared, traces=traces, facts={**question.facts, "prefers_cudnn_attention": True})


def shared_on(question: TracedQuestion, device: Device) -> TracedQuestion:
    """``question_on`` before attention becomes cuDNN's: the traces as they are made on that device."""
    traces = {rank: trace_on(trace, device) for rank, trace in question.traces.items()}
    is_same = all(trace is question.traces[rank] for rank, trace in traces.items())
    return question if is_same else replace(question, traces=traces)


def question_between(known: Mapping[int, TracedQuestion], shape: Shape, device: Device) -> TracedQuestion | None:
    """A question of another size, as it follows from those that hold for a device; None where it does not.

    It holds for every card for which they do and whose cuBLAS workspaces are the device's; ``question_on`` gives it
    what its described calls take there.

    Args:
        known: questions by items. Those of several ranks are left out.
    """
    traces = {
        items: without_card_scratch(with_workspaces_of(trace, device))
        for items, question in known.items()
        if len(question.traces) == 1
        for trace in question.traces.values()
    }
    trace = trace_between(traces, shape.items)
    if trace is None:
        return None
    like = known[next(iter(traces))]
    return replace(like, shape=shape, traces=dict.fromkeys(like.traces, trace))


def footprints_of(question: TracedQuestion, device: Device) -> dict[int, Footprint]:
    """The traces of a question that holds for a device replayed under its memory, by rank."""
    beside = cpu_margin_bytes(device)
    return {
        rank: footprint_on(trace, device, question.world, question.allocator, mesh=question.mesh, beside=beside)
        for rank, trace in question_on(question, device).traces.items()
    }


def answer(
    question: TracedQuestion, name: str, device: Device, seconds: float = 0.0,
    footprints: Mapping[int, Footprint] | None = None,
) -> Prediction:  # fmt: skip
    """The prediction for a device: the traces replayed under its memory, and the rank that needs most.

    Args:
        name: what to call the job.
        seconds: time that the question took so far.
        footprints: what ``footprints_of`` gives; None: not replayed yet.
    """
    traces = question_on(question, device).traces
    footprints = footprints_of(question, device) if footprints is None else footprints
    peaks = {
        rank: max(phase.process_bytes for phase in replayed.phases.values()) for rank, replayed in footprints.items()
    }
    rank = max(peaks, key=lambda rank: peaks[rank])
    ranks = question.mesh.get("pp", 1)
    by_place = {rank * ranks // question.world: peak for rank, peak in peaks.items()}
    return Prediction(
        job=name, settings=question.settings, shape=question.shape, micro_batch=question.shape.units,
        unit=question.unit, device=device, nets=question.nets, footprint=footprints[rank],
        trace=traces[rank], checkpointing=question.checkpointing, engine=question.engine,
        world=question.world, rank=rank, seconds=seconds, mesh=question.mesh, rank_reason=question.rank_reason,
        stages=with_bytes(question.stages, ranks, by_place), not_validated=question.not_validated,
    )  # fmt: skip


def footprint_on(
    trace: Trace,
    device: Device,
    world: int = 1,
    allocator: str = "default",
    *,
    mesh: Mapping[str, int] | None = None,
    torch_version: str | None = None,
    beside: int = 0,
) -> Footprint:
    """A trace replayed through the device's allocator, under its memory.

    Args:
        world: ranks; what their communicators hold lies outside of the allocator.
        mesh: the ranks by dimension, where they have several: each has a communicator of its own.
        allocator: how a card's allocator makes its segments, as a plan has it.
        torch_version: the version whose allocator is replayed; None: the installed one.
        beside: bytes of a CPU's memory that what is no tensor may take: the interval reaches so far above the tensors.

    Raises:
        InputError: the device's memory is not known.
    """
    replay = _replay_on(device, world, allocator, mesh, torch_version, beside)
    usable = replay.usable_bytes
    margin = margin_of(trace.net_kind) if device.is_cuda else None
    return footprint(
        _as_replayed(trace, device), replay.allocator, replay.capacity, usable, replay.outside, margin,
        device.free_bytes,
    )  # fmt: skip


def need_on(
    trace: Trace, device: Device, world: int = 1, allocator: str = "default", *, mesh: Mapping[str, int] | None = None
) -> Need:
    """What ``footprint_on`` says of the need, without the interval; arguments as there."""
    replay = _replay_on(device, world, allocator, mesh, None, 0)
    return need(_as_replayed(trace, device), replay.allocator, replay.capacity, replay.outside)


class _Replay(NamedTuple):
    """Arguments of ``memfit.replay.replay.footprint``."""

    allocator: Callable[[int | None], Allocator]
    capacity: int
    usable_bytes: int
    outside: Outside


def _as_replayed(trace: Trace, device: Device) -> Trace:
    return with_third_window(with_workspaces_of(trace, device)) if device.is_cuda else trace


def _replay_on(
    device: Device, world: int, allocator: str, mesh: Mapping[str, int] | None, torch_version: str | None, beside: int
) -> _Replay:
    if device.usable_bytes is None:
        raise InputError(f"device {device.key}", "its memory is not known", "give --memory SIZE")
    if not device.is_cuda:
        return _Replay(CpuAllocator, device.usable_bytes, device.usable_bytes, Outside(high=beside))
    count = communicators(world, mesh or {})
    nccl = tuple(count * nbytes for nbytes in nccl_bytes(device))
    context = (device.context_low or 0, device.context_bytes or 0, device.context_high or 0)
    low, usual, high = (own + shared for own, shared in zip(context, nccl, strict=True))
    config = AllocatorConfig(expandable_segments=allocator == "expandable_segments")
    if torch_version is not None:
        config = replace(config, youngest_first=takes_youngest(torch_version))
    return _Replay(
        partial(CachingAllocator, config=config), device.usable_bytes - usual, device.usable_bytes,
        Outside(bytes=usual, low=low, high=high),
    )  # fmt: skip
