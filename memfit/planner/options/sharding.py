"""The sharding option: parameters, gradients and optimizer state split over ranks."""

from __future__ import annotations

from dataclasses import replace

from memfit.device.hardware.catalogue import interconnect_of
from memfit.engine.capabilities import CAPABILITIES
from memfit.errors import InputError
from memfit.mesh import MeshShape
from memfit.plan import MemoryOption
from memfit.planner.live_bytes import fall, live_bytes_of
from memfit.planner.options.option_context import OptionContext, memory_option
from memfit.planner.search.engine_choice import communication_model
from memfit.sizes import format_size
from memfit.trace.step import trace_job

OF_SHARDS = ("half_gather", "sync_each_micro_batch", "cpu_offload")
"""Choices of an engine that are of sharded nets alone."""


def sharding(context: OptionContext) -> MemoryOption:
    """Traces the plan under an engine that shards, or under one that does not."""
    candidate, name = context.candidate, "sharding"
    ranks = candidate.geometry.data_parallel
    if ranks == 1 and context.full_step.how.world > 1:
        reason = "the ranks hold parts of the nets already, as --mesh sets it"
        return memory_option(context, name, False, {}, reason, seconds=0.0)
    mesh = context.full_step.how.mesh
    if mesh is not None and mesh.world > mesh.data_ranks:
        return _sharding_of_parts(context, mesh)
    if ranks == 1:
        parts = candidate.footprint.phases["train"].categories
        half = sum(parts[category] for category in ("parameters", "gradients", "optimizer")) // 2
        reason = f"the plan uses one device; with --devices 2 each would hold {format_size(half)} less"
        return memory_option(context, name, False, {}, reason, seconds=0.0)
    applied = not CAPABILITIES[candidate.engine].whole_state
    other = "ddp" if applied else "fsdp2"
    how = replace(context.full_step.how, engine=other, mesh=None, engine_choices={})
    try:
        trace = trace_job(context.job, how.shape_of(context.job, candidate.geometry.micro_batch), how)
    except InputError as error:
        unknown = f"{other} cannot carry the job: {error}"
        return memory_option(context, name, applied, dict.fromkeys(context.phases), "", seconds=None, unknown=unknown)
    there = live_bytes_of(trace, context.device).peaks()
    saves = fall(there, context.peaks) if applied else fall(context.peaks, there)
    seconds = None
    if interconnect_of(context.device) is not None:
        count = len(candidate.geometry.micro_batches[0])
        now = (candidate.engine, context.full_step.how.mesh)
        sharded, replicated = (
            communication_model(engine, context.nets, context.device, ranks, mesh)(count)
            for engine, mesh in ((now, (other, None)) if applied else ((other, None), now))
        )
        seconds = sharded - replicated
    why = f"{candidate.engine}: see the reason for the engine" if applied else "full replicas fit"
    unknown = "" if seconds is not None else "time: the link between the cards is unknown"
    return memory_option(
        context, name, applied, dict(saves), why, seconds=seconds, costs="communication between ranks", unknown=unknown
    )


def _sharding_of_parts(context: OptionContext, mesh: MeshShape) -> MemoryOption:
    """Of ranks that hold parts of the nets already (stages, cut layers, experts): their data-parallel ranks sharded, or
    replicas."""
    applied, ranks = mesh.dp_shard > 1, mesh.data_ranks
    other = replace(mesh, dp_replicate=ranks if applied else 1, dp_shard=1 if applied else ranks)
    choices = {key: value for key, value in context.full_step.how.engine_choices.items() if key not in OF_SHARDS}
    why = "--mesh sets it" if applied else "replicas fit"
    try:
        how = replace(context.full_step.how, mesh=other, engine_choices=choices)
        trace = trace_job(context.job, how.shape_of(context.job, context.candidate.geometry.micro_batch), how)
    except InputError as error:
        unknown = f"the mesh {other} cannot carry the job: {error}"
        saved: dict[str, int | None] = dict.fromkeys(context.phases)
        return memory_option(context, "sharding", applied, saved, why, seconds=None, unknown=unknown)
    there = live_bytes_of(trace, context.device).peaks()
    saves = fall(there, context.peaks) if applied else fall(context.peaks, there)
    return memory_option(
        context, "sharding", applied, dict(saves), why, seconds=None, costs="communication between ranks",
        unknown=f"time: the communication of {other} was not estimated",
    )  # fmt: skip
