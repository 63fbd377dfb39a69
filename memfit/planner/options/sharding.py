"""The lever of sharding: parameters, gradients and optimizers' state cut over ranks, each of which holds its part."""

from __future__ import annotations

from dataclasses import replace

from memfit.device.hardware.catalogue import interconnect_of
from memfit.errors import InputError
from memfit.geometry import shape_of
from memfit.plan import MemoryOption
from memfit.planner.live_bytes import fall, live_bytes_of
from memfit.planner.options.option_context import OptionContext, memory_option
from memfit.planner.search.engine_choice import communicates
from memfit.sizes import format_size
from memfit.trace.step import trace_job

REPLICAS = ("single", "ddp")


def sharding(context: OptionContext) -> MemoryOption:
    """Of several devices, the same plan traced under the engine that shards, or under the one that does not."""
    found, name = context.found, "sharding"
    ranks = found.geometry.data_parallel
    if ranks == 1:
        parts = found.footprint.phases["train"].categories
        half = sum(parts[one] for one in ("parameters", "gradients", "optimizer")) // 2
        reason = f"one device has nobody to share with; with --devices 2 each would hold {format_size(half)} less"
        return memory_option(context, name, False, {}, reason, seconds=0.0)
    taken = found.engine not in REPLICAS
    other = "ddp" if taken else "fsdp2"
    how = replace(context.whole.how, engine=other)
    try:
        trace = trace_job(context.job, shape_of(context.job, found.geometry.micro_batch), how)
    except InputError as error:
        unknown = f"{other} cannot carry the job: {error}"
        return memory_option(context, name, taken, dict.fromkeys(context.phases), "", seconds=None, unknown=unknown)
    there = live_bytes_of(trace, context.device).peaks()
    saves = fall(there, context.peaks) if taken else fall(context.peaks, there)
    seconds = None
    if interconnect_of(context.device) is not None:
        count = len(found.geometry.micro_batches[0])
        sharded, whole = (
            communicates(engine, context.nets, context.device, ranks)(count)
            for engine in ((found.engine, other) if taken else (other, found.engine))
        )
        seconds = sharded - whole
    why = f"{found.engine}: the reasons say what each engine comes to" if taken else "whole copies fit"
    unknown = "" if seconds is not None else "time: what joins the cards is not known"
    return memory_option(
        context, name, taken, dict(saves), why, seconds=seconds, costs="parts sent between ranks", unknown=unknown
    )
