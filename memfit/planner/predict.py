"""Prediction: a job's Footprint on a device, made without the device."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.apply.build_nets import nets_of
from memfit.apply.train_state import check_nets
from memfit.blocks import checkpoint_candidates
from memfit.device.hardware.catalogue import Device
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.device.virtual.card_rules import attention_shared, recorded_facts
from memfit.engine.capabilities import CAPABILITIES, dimensions
from memfit.engine.factory import check_choices
from memfit.engine.pipeline_cut import distinct_ranks, schedule_of
from memfit.engine.stage_bounds import FIRST_MODULES
from memfit.engine.zero_partition import most_gradients
from memfit.errors import InputError
from memfit.frame_room import in_frame_room
from memfit.geometry import counted_in
from memfit.job import Job, Nets, Shape
from memfit.mesh import MeshShape
from memfit.plan import Plan
from memfit.planner.batch_check import check_batch
from memfit.planner.pipeline.stage_figures import StageFigures
from memfit.planner.prediction import (
    NetSize,
    Prediction,
    TracedQuestion,
    answer,
    device_facts,
    footprint_on,
    holds_for,
    shared_on,
)
from memfit.trace.event_record import let_stay
from memfit.trace.prepared_job import leave_prepared
from memfit.trace.scratch_by_size import ScratchBySize
from memfit.trace.step import Tracing, trace_job
from memfit.trace.tracer import Tracer

__all__ = ["NetSize", "Prediction", "footprint_on", "predict"]

BINDING_RANK = 0
"""The rank that needs most, of ranks that run the same micro-batches: shards are cut by ceiling division, so that no
rank holds a larger part of any tensor, and of whole replicas it alone keeps the average of the weights."""


@in_frame_room
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
    mesh: MeshShape | None = None,
    rank: int | None = None,
    engine_choices: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
) -> Prediction:
    """Predicts one micro-batch shape of a job on a device.

    Args:
        name: what to call the job.
        micro_batches: micro-batches in a window; from two on, gradients are resident in the second forward.
        checkpointing: mode by module path; None: the job's own default.
        engine: how the nets are put onto ranks.
        engine_choices: the engine's own choices, as ``Tracing`` has them.
        world: ranks, each on such a device, each with such micro-batches.
        mesh: the ranks by dimension, as many as ``world``; None: all in the one that the engine is for.
        rank: which of them; None: the one that needs most.
        plan: where its optimizers' implementation and its room for validation and saving come from.

    Raises:
        InputError: a rank that is not there, several ranks on the engine of one, or a job or mesh that the engine
            cannot carry.
    """
    begin = time.perf_counter()
    question = trace_question(
        job, shape, device, micro_batches=micro_batches, checkpointing=checkpointing, engine=engine, world=world,
        mesh=mesh, rank=rank, engine_choices=engine_choices, plan=plan,
    )  # fmt: skip
    prediction = answer(question, name, device)
    return replace(prediction, seconds=time.perf_counter() - begin)


def trace_question(
    job: Job,
    shape: Shape,
    device: Device,
    *,
    micro_batches: int = 1,
    checkpointing: Mapping[str, str] | None = None,
    engine: str = "single",
    world: int = 1,
    mesh: MeshShape | None = None,
    rank: int | None = None,
    engine_choices: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    scratch_by_size: ScratchBySize | None = None,
    sizes: tuple[NetSize, ...] | None = None,
    like: TracedQuestion | None = None,
) -> TracedQuestion:
    """The traces that ``predict`` replays; arguments as there.

    Args:
        scratch_by_size: of the same question with other items, see ``memfit.trace.scratch_by_size``.
        sizes: of the job's nets, where they are known; with ``checkpointing`` and one rank, nothing else is read of
            nets that are built for it.
        like: the same job's at another size or on another card: windows that follow from it are not traced.
    """
    check_world(world, mesh)
    _check_ranks(engine, world, rank)
    check_choices(engine, engine_choices or {})
    mesh = dimensions(engine, mesh)
    nets = plain_nets(job, world) if sizes is None or checkpointing is None or world > 1 else {}
    check_batch(job, shape)
    modes = default_checkpointing(job, nets) if checkpointing is None else dict(checkpointing)
    how = Tracing(
        device=device, micro_batches=micro_batches, checkpointing=modes, engine=engine, world=world,
        mesh=mesh, engine_choices=engine_choices or {}, scratch_by_size=scratch_by_size,
    )  # fmt: skip
    if plan is not None:
        how = replace(
            how, implementation=plan.implementation, validation=plan.validation, saving=plan.saving,
            optimizer_state=plan.optimizer_state, average=plan.average,
        )  # fmt: skip
    facts = None
    if like is not None and holds_for(like, device):
        like, facts = shared_on(like, device), frozenset(like.facts)
    stages: tuple[StageFigures, ...] = ()
    if how.stages > 1:
        from memfit.planner.pipeline.timed_stages import timed_stages

        stages = timed_stages(job, nets, how, shape)
        first_modules = [stage.first_module for stage in stages]
        how = replace(how, engine_choices={**how.engine_choices, FIRST_MODULES: first_modules})
    ranks = binding_ranks(job, nets, engine, world, mesh, how.engine_choices) if rank is None else (rank,)
    with recorded_facts() as read, attention_shared():
        traces = {
            rank: trace_job(
                job, shape, replace(how, rank=rank, like=like.traces.get(rank) if like else None, facts_of_like=facts)
            )
            for rank in ranks
        }
    if assumed := assumed_lengths(job, shape):
        traces = {rank: replace(trace, assumed=(assumed, *trace.assumed)) for rank, trace in traces.items()}
    return TracedQuestion(
        settings=job.settings(),
        shape=shape,
        unit=job.unit,
        nets=net_sizes(nets) if nets or sizes is None else sizes,
        checkpointing=modes,
        engine=engine,
        world=world,
        traces=traces,
        allocator=plan.allocator if plan is not None else "default",
        facts=device_facts(device, read),
        mesh=mesh.sizes() if mesh is not None else {},
        rank_reason=binding_reason(mesh) if mesh is not None and rank is None else "",
        stages=stages,
    )


def assumed_lengths(job: Job, shape: Shape) -> str:
    """Says that a job's ``lengths()`` is not read where a shape holds its longest samples; else empty."""
    if type(job).lengths is Job.lengths or job.longest is None or shape.length != job.longest:
        return ""
    return f"every sample is as long as the longest, {job.longest} {counted_in(job)}; memfit plan reads lengths()"


def binding_ranks(
    job: Job, nets: Nets, engine: str, world: int, mesh: MeshShape | None = None,
    engine_choices: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Ranks of which one needs most: ``BINDING_RANK``, under ZeRO's stages 1 and 2 or the one with most gradients.

    Of ranks that hold parts of a sequence it is the first, whose shards are largest, or the last, for whose part
    attention computes most. Of a pipeline's ranks that hold the same modules it is the first, on which most
    micro-batches are on their way, and of those that hold parts of the same stage the first too, or the last of its
    sequence.

    Args:
        engine_choices: a pipeline's schedule, and the first modules of its stages.
    """
    does = CAPABILITIES[engine]
    if mesh is not None and mesh.pp > 1:
        choices = engine_choices or {}
        places = distinct_ranks(job, nets, mesh.pp, schedule_of(choices), choices.get(FIRST_MODULES, ()))
        ends = dict.fromkeys((BINDING_RANK, last_of_sequence(mesh)))
        return tuple(place * (world // mesh.pp) + end for place in places for end in ends)
    if mesh is not None and mesh.cp > 1:
        return (BINDING_RANK, last_of_sequence(mesh))
    if not does.is_deepspeed or does.shards_weights or world == 1:
        return (BINDING_RANK,)
    groups = [group["params"] for optimizer in job.optimizers(nets).values() for group in optimizer.param_groups]
    most = most_gradients([[p.numel() for p in group if p.requires_grad] for group in groups], world)
    return tuple({BINDING_RANK: None, most: None})


def last_of_sequence(mesh: MeshShape) -> int:
    """The rank with the last part of the first share's sequences, of those of a stage."""
    return (mesh.cp - 1) * mesh.tp * mesh.ep


def binding_reason(mesh: MeshShape) -> str:
    """Why no rank of a mesh needs more than ``BINDING_RANK``, in words."""
    cut = [name for name in mesh.sizes() if name not in ("dp_replicate", "pp", "cp")]
    places = " and ".join(f"{name} 0" for name in cut)
    divided = "experts are divided equally, " if {"ep", "dp_shard_in_ep"} & set(cut) else ""
    whole = cut == ["ep"] and mesh.cp == 1
    others = "all else is whole" if whole else "tensors are cut by ceiling division, first parts are largest"
    sent = ", where routers send as many tokens to each rank" if mesh.dp_shard_in_ep > 1 else ""
    parts = f"no rank needs more than those with {places}: {divided}{others}{sent}"
    if mesh.cp > 1:
        ends = f"of ranks of one sequence those with the largest shards (cp 0) and most attention (cp {mesh.cp - 1})"
        ends = f"{ends} were traced"
        parts = f"{ends}; {parts}" if cut else ends
    if mesh.pp == 1:
        return parts
    stages = "of stages that hold the same modules the first needs most, and of the others all were traced"
    return f"{stages}; within a stage, {parts}" if cut or mesh.cp > 1 else stages


def check_world(world: int, mesh: MeshShape | None) -> None:
    """Raises InputError where a mesh has another number of ranks, or more than one process simulates."""
    if mesh is not None:
        check_fake_ranks(f"--mesh {mesh}", mesh.world)
        if mesh.world != world:
            raise InputError(f"--mesh {mesh} --world {world}", f"the mesh has {mesh.world} ranks", "leave --world out")


def _check_ranks(engine: str, world: int, rank: int | None) -> None:
    check_fake_ranks(f"--world {world}", world)
    if not CAPABILITIES[engine].several_ranks and world > 1:
        raise InputError(f"--world {world}", "--engine single has one rank", "write --engine ddp or --engine fsdp2")
    if rank is not None and not 0 <= rank < world:
        raise InputError(f"--rank {rank}", f"there are ranks 0 to {world - 1}", f"write --rank {world - 1} or less")


def plain_nets(job: Job, world: int = 1) -> Nets:
    """The job's nets without their bytes, for counting and for finding modules; no trace that is open sees them.

    Args:
        world: ranks of the run; code of the job that asks is rank 0.
    """
    from memfit.device.virtual.fake_group import predicted_ranks
    from memfit.device.virtual.library_patches import as_in_a_real_run
    from memfit.device.virtual.virtual_device import virtual_cpu
    from memfit.torch_compat import disable_current_modes

    leave_prepared()
    with (
        disable_current_modes(), virtual_cpu() as virtual, as_in_a_real_run(), predicted_ranks(world),
        Tracer(virtual).recording(),
    ):  # fmt: skip
        nets: Nets = nets_of(job, virtual.device)
    check_nets(job, nets)
    let_stay(nets.values())
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
        return plain_nets(watched), bool(read)
    except Exception:  # of a class that cannot be watched, or the job's own: then it is raised again, from its own line
        return plain_nets(job), True


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
    return dict.fromkeys(checkpoint_candidates(job, nets), "full")


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
    """The job in another precision; None: in its own."""
    if precision is None:
        return job
    return type(job)(**{**job.settings(), "precision": precision})
