"""Memory-saving options of a plan: what each saves and costs, whether it changes what is learned, and why it applies.

The saving of an applied option is how far each phase's peak would rise without it; of any other option, how far it
would fall with it. The rest of the plan stays the same. Peaks count tensors' bytes and come from traces of the plan and
of its variants.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.apply.optimizer_implementation import implementation_of, supports
from memfit.apply.train_state import make_optimizers
from memfit.device.hardware.catalogue import Device
from memfit.engine.capabilities import CAPABILITIES
from memfit.job import Job, Nets
from memfit.plan import MemoryOption
from memfit.planner.options import validation_policies
from memfit.planner.options.optimizer_state import average_on_host, eight_bit, state_on_host
from memfit.planner.options.option_context import OptionContext, memory_option, more
from memfit.planner.options.option_traces import KINDS
from memfit.planner.options.sharding import sharding
from memfit.planner.options.validation import of_validation
from memfit.planner.search.full_step import ReplayedCandidate
from memfit.planner.variable_length.length_check import EXPANDABLE
from memfit.sizes import format_size
from memfit.trace.step import Tracing
from memfit.wording import counted

NOT_TRACED = "bytes: no variant of the plan was traced, because its first estimate seemed too large"


def implementation(job: Job, nets: Nets, device: Device) -> str:
    """``fused`` on a card where every optimizer supports it and the job does not use it already; else ``job``."""
    if not device.is_cuda:
        return "job"
    optimizers = make_optimizers(job, nets).values()
    now = {implementation_of(optimizer, cuda=True) for optimizer in optimizers if supports(optimizer, "foreach")}
    can = all(supports(optimizer, "fused") for optimizer in optimizers if supports(optimizer, "foreach"))
    return "fused" if can and now - {"fused"} else "job"


def memory_options(context: OptionContext) -> list[MemoryOption]:
    """Every memory-saving option of a plan."""
    return [
        *_optimizer(context),
        *_allocator(context),
        *_buckets(context),
        average_on_host(context),
        _checkpointing(context),
        _offload(context),
        _accumulation(context),
        *of_validation(context),
        state_on_host(context),
        eight_bit(context),
        sharding(context),
        _precision(context),
    ]


def reasons(chosen: ReplayedCandidate, own: Mapping[str, str], device: Device, how: Tracing) -> dict[str, str]:
    """The reason for each choice of a plan."""
    geometry, modes = chosen.geometry, dict(chosen.checkpointing)
    at_once = len(geometry.micro_batches[0]) == 1
    recomputed = sum(mode != "keep" for mode in modes.values())
    if not recomputed:
        why = f"everything fits in {format_size(device.usable_bytes or 0)} without recomputing"
    elif modes == dict(own):
        why = "the job's own"
    else:
        why = f"{chosen.policy}: the fastest choice with which the micro-batch fits"
    return {
        "micro_batch": "the whole global batch fits at once, and no split of it is faster"
        if at_once
        else f"{geometry.arithmetic()}: fastest of the splits that fit",
        "checkpointing": why,
        "precision": "the job's own; another precision would change what is learned",
        "engine": "one device" if how.world == 1 else f"{how.engine} on {how.world} devices",
        "optimizer": f"{how.implementation}: avoids temporaries as large as the parameters"
        if how.implementation == "fused"
        else "the job's own",
        **(
            {"optimizer_state": "on the host between steps; nothing fits otherwise"}
            if how.optimizer_state == "host"
            else {}
        ),
        "validation": "; ".join(validation_policies.words(how.validation, {})) or "as the job has it",
    }


def _optimizer(context: OptionContext) -> list[MemoryOption]:
    """For-each and fused implementations. Left out: a fused one's step counts on the card, 512 bytes a tensor."""
    steps, own, how = context.traces.steps, context.traces.own_kinds, context.full_step.how
    memory_options = []
    for kind, name, why in zip(
        KINDS,
        ("for-each optimizer", "fused optimizer"),
        ("updates all tensors at once, with temporaries as large as the parameters", "the same update in one kernel"),
        strict=True,
    ):
        if kind not in steps:
            lacks = context.traces.lacking or "one of the optimizers"
            memory_options.append(memory_option(context, name, False, {}, f"{lacks} does not support it", seconds=0.0))
            continue
        applied = how.implementation == kind or (how.implementation == "job" and own == {kind})
        saves = context.train_saves(step="own" if applied else kind)
        if applied:
            reason = why if how.implementation == kind else "the job's own"
            seconds = more(steps["chosen"].seconds, steps["own"].seconds if "own" in steps else None)
        else:
            seconds = more(steps[kind].seconds, steps["chosen"].seconds)
            if "optimizer" in context.keep:
                reason = "--keep optimizer"
            elif how.implementation == "fused":
                reason = "the fused optimizer does the same without temporaries"
            else:
                reason = "the plan keeps the job's own on this device"
        saves = -saves if applied and saves is not None else saves
        unknown = "" if seconds is not None else "time: other implementations are timed only on cards"
        unknown = NOT_TRACED if saves is None else unknown
        memory_options.append(
            memory_option(context, name, applied, {"train": saves}, reason, seconds=seconds, unknown=unknown)
        )
    return memory_options


def _buckets(context: OptionContext) -> list[MemoryOption]:
    """Both avoid DistributedDataParallel's buckets, which are as large as the gradients and stay for the whole run."""
    does = CAPABILITIES[context.candidate.engine]
    single, ddp = context.full_step.how.world == 1, does.several_ranks and does.whole_state
    twice = "DDP's buckets would hold a second copy of every gradient"
    without = "without DDP there are no buckets" if single else f"{context.candidate.engine} has no buckets of DDP"
    saves = context.all_phases(context.gradients)
    several = "the plan uses several devices"
    return [
        memory_option(
            context, "no DDP for one device", single, saves if single else {}, twice if single else several,
            seconds=0.0,
        ),
        memory_option(
            context, "gradients as bucket views", ddp, saves if ddp else {}, twice if ddp else without, seconds=0.0
        ),
    ]  # fmt: skip


def _allocator(context: OptionContext) -> list[MemoryOption]:
    """Expandable segments, in which freed memory serves every size; savings are of reserved bytes."""
    if not context.candidate.allocator_bytes:
        return []
    applied = context.candidate.allocator != "default"
    reason = "without it, a window fails because of fragmentation" if applied else "the plan fits without it"
    return [memory_option(context, EXPANDABLE, applied, context.candidate.allocator_bytes, reason, seconds=0.0)]


def _checkpointing(context: OptionContext) -> MemoryOption:
    """Checkpointing of the chosen modules, or of every block where none is chosen."""
    modes, tried = context.candidate.checkpointing, context.traces.micro
    recomputed = any(mode != "keep" for mode in modes.values())
    kinds = sorted({mode for mode in modes.values() if mode != "keep"})
    name = f"checkpointing by module ({', '.join(kinds)})" if kinds else "checkpointing by module"
    if "checkpointing" in context.keep:
        reason = "--keep checkpointing: the job's own"
    elif recomputed:
        reason = f"keeping everything would take {format_size(context.traces.kept_bytes)}"
    elif context.full_step.how.stages > 1:
        reason = "everything is kept; where that does not fit, stages of a pipeline recompute every block"
        return memory_option(context, name, False, {}, reason, seconds=None, unknown="bytes and time: not traced")
    elif "full" not in tried:
        return memory_option(context, name, False, {}, "the nets have no blocks to recompute", seconds=0.0)
    else:
        reason = "the plan fits without it"
    if recomputed:
        saves = _negative(context.train_saves(micro="keep"))
        seconds = more(_seconds(context, "chosen"), _seconds(context, "keep"))
    else:
        saves = context.train_saves(micro="full")
        seconds = more(_seconds(context, "full"), _seconds(context, "chosen"))
    unknown = NOT_TRACED if saves is None else _no_rates(context, seconds)
    return memory_option(context, name, recomputed, {"train": saves}, reason, seconds=seconds, unknown=unknown)


def _offload(context: OptionContext) -> MemoryOption:
    """Offload of every block's activations, or of the chosen modules', with everything else kept."""
    name, tried = "offload of saved activations", context.traces.micro
    modes = list(context.candidate.checkpointing.values())
    if not context.device.is_cuda:
        return memory_option(context, name, False, {}, "the host is the device", seconds=0.0)
    if "offload" not in tried:
        return memory_option(
            context, name, False, {}, "the nets have no blocks whose activations could move", seconds=0.0
        )
    applied = "offload" in modes
    if applied:
        reason = f"{counted(modes.count('offload'), 'module')}: recomputing takes longer or needs more memory"
        saves, seconds = (
            _negative(context.train_saves(micro="keep")),
            more(_seconds(context, "chosen"), _seconds(context, "keep")),
        )
    else:
        saves = context.train_saves(micro="offload")
        seconds = more(_seconds(context, "offload"), _seconds(context, "chosen"))
        if context.device.link_bytes is None:
            reason = "the rate of the link to the host is unknown"
        elif any(mode != "keep" for mode in modes):
            reason = "recomputing takes less time"
        else:
            reason = "the plan fits without it"
    unknown = "" if seconds is not None else "time: the rate of the link to the host is unknown"
    return memory_option(
        context, name, applied, {"train": saves}, reason, seconds=seconds, costs="copies", unknown=unknown
    )


def _accumulation(context: OptionContext) -> MemoryOption:
    name, tried = validation_policies.ACCUMULATION, context.traces.micro
    applied = len(context.candidate.geometry.micro_batches[0]) > 1
    other = "at once" if applied else "split"
    if not applied and other not in tried:
        return memory_option(context, name, False, {}, "the micro-batch cannot be smaller", seconds=0.0)
    train, seconds = context.train_saves(micro=other), more(_seconds(context, other), _seconds(context, "chosen"))
    validate, why = _validate_resized(context)
    saves = {"train": train, **({"validate": validate} if "validate" in context.phases else {})}
    reason = f"the global batch fits at once; the figures are for {context.traces.split_in}"
    if applied:
        saves, seconds = {phase: _negative(nbytes) for phase, nbytes in saves.items()}, _negative_seconds(seconds)
        reason = "fastest of the splits that fit"
    unknown = NOT_TRACED if train is None else why or _no_rates(context, seconds)
    return memory_option(context, name, applied, saves, reason, seconds=seconds, unknown=unknown)


def _validate_resized(context: OptionContext) -> tuple[int | None, str]:
    """(how far validation's peak falls with the other micro-batch, why that is unknown)."""
    follows = validation_policies.can_be_smaller(context.job) and context.full_step.how.validation.items is None
    if not follows or "validate" not in context.phases:
        return 0, ""
    traced = context.full_step.other_policies.get(
        validation_policies.ACCUMULATION, "bytes: not traced while optimizer state is moved aside"
    )
    if isinstance(traced, str) or traced.peak is None:
        return None, traced if isinstance(traced, str) else NOT_TRACED
    return context.peaks["validate"] - traced.peak, ""


def _precision(context: OptionContext) -> MemoryOption:
    """Autocast or its absence: with it, activations of products are half as large."""
    job = context.job
    applied = job.precision != "fp32"
    other = validation_policies.other_precision(job)
    train = context.train_saves(micro="precision")
    validate, why = _validate_in_other(context)
    seconds = more(_seconds(context, "precision"), _seconds(context, "chosen"))
    saves: dict[str, int | None] = {"train": train, **({"validate": validate} if "validate" in context.phases else {})}
    if applied:
        saves, seconds = {phase: _negative(nbytes) for phase, nbytes in saves.items()}, _negative_seconds(seconds)
        reason = "the request allows it" if type(job).precision == "fp32" else "the job's own"
    elif other == "bf16" and context.device.is_cuda and (context.device.compute_capability or (8, 0)) < (8, 0):
        reason = "the card has no bf16 units"
    else:
        reason = "--keep precision" if "precision" in context.keep else "--allow precision applies it"
    unknown = "; ".join(dict.fromkeys(filter(None, [context.traces.unknown.get("precision", ""), why])))
    if seconds is None and not unknown:
        unknown = "time: another precision is timed only on cards"
    changes = not applied or type(job).precision == "fp32"
    name = f"{job.precision if applied else other} autocast"
    return memory_option(
        context, name, applied, saves, reason, seconds=seconds, changes_learning=changes, unknown=unknown
    )  # fmt: skip


def _validate_in_other(context: OptionContext) -> tuple[int | None, str]:
    """(how far validation's peak falls in the other precision, why that is unknown)."""
    if "validate" not in context.phases:
        return 0, ""
    traced = context.full_step.other_policies.get(
        validation_policies.PRECISION, "not traced while optimizer state is moved aside"
    )
    if isinstance(traced, str):
        return None, traced
    return (None if traced.peak is None else context.peaks["validate"] - traced.peak), ""


def _seconds(context: OptionContext, name: str) -> float | None:
    variant = context.traces.micro.get(name)
    return variant.seconds if variant else None


def _negative_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else -seconds


def _negative(nbytes: int | None) -> int | None:
    return None if nbytes is None else -nbytes


def _no_rates(context: OptionContext, seconds: float | None) -> str:
    if seconds is not None:
        return ""
    return "time: the card's rates are unknown" if context.device.is_cuda else "time: not run on this processor"
