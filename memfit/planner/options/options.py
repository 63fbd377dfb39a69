"""Levers: what a plan could do, what each saves and costs, whether it changes what is learned, and why it was taken.

A lever that was taken saves what each phase's peak would rise by without it, one that was left what the peak would fall
by with it; the rest of the plan stays. Peaks are of tensors' bytes, from traces of the plan and of what lies beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.apply.optimizer_implementation import implementation_of, supports
from memfit.device.hardware.catalogue import Device
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

NOT_TRACED = "bytes: nothing was traced beside the plan, whose draft alone seemed too large"


def implementation(job: Job, nets: Nets, device: Device) -> str:
    """``fused`` on a card where it takes another way than the job's and every optimizer can; else the job's own."""
    if not device.is_cuda:
        return "job"
    optimizers = job.optimizers(nets).values()
    now = {implementation_of(optimizer, cuda=True) for optimizer in optimizers if supports(optimizer, "foreach")}
    can = all(supports(optimizer, "fused") for optimizer in optimizers if supports(optimizer, "foreach"))
    return "fused" if can and now - {"fused"} else "job"


def describe(context: OptionContext) -> list[MemoryOption]:
    """Every lever of a plan."""
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
    """Why each choice of a plan was made."""
    geometry, modes = chosen.geometry, dict(chosen.checkpointing)
    at_once = len(geometry.micro_batches[0]) == 1
    recomputed = sum(mode != "keep" for mode in modes.values())
    if not recomputed:
        why = f"everything fits {format_size(device.usable_bytes or 0)} without recomputing"
    elif modes == dict(own):
        why = "the job's own"
    else:
        why = f"{chosen.policy}: the least time in which the micro-batch fits"
    return {
        "micro_batch": "the whole global batch fits at once, and nothing else is faster"
        if at_once
        else "with this much accumulated, a window takes the least time of all that fit",
        "checkpointing": why,
        "precision": "the job's own; another would change what is learned",
        "engine": "one device" if geometry.data_parallel == 1 else f"{geometry.data_parallel} devices, same weights",
        "optimizer": f"{how.implementation}: no temporaries as large as the parameters"
        if how.implementation == "fused"
        else "the job's own",
        **(
            {"optimizer_state": "on the host between steps: nothing fits without"}
            if how.optimizer_state == "host"
            else {}
        ),
        "validation": "; ".join(validation_policies.words(how.validation, {})) or "as the job has it",
    }


def _optimizer(context: OptionContext) -> list[MemoryOption]:
    """Left out: the counts of steps that a fused one keeps on the card, 512 bytes a tensor."""
    steps, own, how = context.beside.steps, context.beside.own_kinds, context.whole.how
    found = []
    for kind, name, why in zip(
        KINDS,
        ("for-each optimizer", "fused optimizer"),
        ("all tensors at once, with temporaries as large as the parameters", "the same rule in one kernel"),
        strict=True,
    ):
        if kind not in steps:
            lacks = context.beside.lacking or "one of the optimizers"
            found.append(memory_option(context, name, False, {}, f"{lacks} has no such implementation", seconds=0.0))
            continue
        taken = how.implementation == kind or (how.implementation == "job" and own == {kind})
        saves = context.train_saves(step="own" if taken else kind)
        if taken:
            reason = why if how.implementation == kind else "the job's own"
            seconds = more(steps["chosen"].seconds, steps["own"].seconds if "own" in steps else None)
        else:
            seconds = more(steps[kind].seconds, steps["chosen"].seconds)
            if "optimizer" in context.keep:
                reason = "--keep optimizer"
            elif how.implementation == "fused":
                reason = "the fused one does the same without temporaries"
            else:
                reason = "the job's own is kept on this device"
        saves = -saves if taken and saves is not None else saves
        unknown = "" if seconds is not None else "time: other implementations are timed on cards alone"
        unknown = NOT_TRACED if saves is None else unknown
        found.append(memory_option(context, name, taken, {"train": saves}, reason, seconds=seconds, unknown=unknown))
    return found


def _buckets(context: OptionContext) -> list[MemoryOption]:
    """DistributedDataParallel's buckets are as large as the gradients, and stay for the whole run."""
    one, ddp = context.found.geometry.data_parallel == 1, context.found.engine == "ddp"
    twice = "DDP's buckets hold every gradient a second time"
    without = "without DDP there are no buckets"
    saves = context.all_phases(context.gradients)
    return [
        memory_option(
            context, "no DDP for one device", one, saves if one else {}, twice if one else "there are several devices",
            seconds=0.0,
        ),
        memory_option(
            context, "gradients as bucket views", ddp, saves if ddp else {}, twice if ddp else without, seconds=0.0
        ),
    ]  # fmt: skip


def _allocator(context: OptionContext) -> list[MemoryOption]:
    """Expandable segments, which have no blocks that other sizes cannot use: reserved bytes, of each phase's."""
    if not context.found.allocator_bytes:
        return []
    taken = context.found.allocator != "default"
    reason = "without, a window asks for what lies in fragments" if taken else "it fits without"
    return [memory_option(context, EXPANDABLE, taken, context.found.allocator_bytes, reason, seconds=0.0)]


def _checkpointing(context: OptionContext) -> MemoryOption:
    """Of the modules that were chosen, or of every block where none was."""
    modes, tried = context.found.checkpointing, context.beside.micro
    recomputed = any(mode != "keep" for mode in modes.values())
    kinds = sorted({mode for mode in modes.values() if mode != "keep"})
    name = f"checkpointing by module ({', '.join(kinds)})" if kinds else "checkpointing by module"
    if "checkpointing" in context.keep:
        reason = "--keep checkpointing: the job's own"
    elif recomputed:
        reason = f"everything kept would take {format_size(context.beside.kept_bytes)}"
    elif "full" not in tried:
        return memory_option(context, name, False, {}, "the nets have no blocks that could be recomputed", seconds=0.0)
    else:
        reason = "it fits without"
    if recomputed:
        saves = _negative(context.train_saves(micro="keep"))
        seconds = more(_seconds(context, "chosen"), _seconds(context, "keep"))
    else:
        saves = context.train_saves(micro="full")
        seconds = more(_seconds(context, "full"), _seconds(context, "chosen"))
    unknown = NOT_TRACED if saves is None else _no_rates(context, seconds)
    return memory_option(context, name, recomputed, {"train": saves}, reason, seconds=seconds, unknown=unknown)


def _offload(context: OptionContext) -> MemoryOption:
    """Of what every block keeps for the backward, or of the modules that were chosen, with all else kept."""
    name, tried = "offload of saved activations", context.beside.micro
    modes = list(context.found.checkpointing.values())
    if not context.device.is_cuda:
        return memory_option(context, name, False, {}, "the host is the device", seconds=0.0)
    if "offload" not in tried:
        return memory_option(
            context, name, False, {}, "the nets have no blocks whose activations could be moved", seconds=0.0
        )
    taken = "offload" in modes
    if taken:
        reason = f"{modes.count('offload')} of the modules: recomputing them takes longer, or more memory"
        saves, seconds = (
            _negative(context.train_saves(micro="keep")),
            more(_seconds(context, "chosen"), _seconds(context, "keep")),
        )
    else:
        saves = context.train_saves(micro="offload")
        seconds = more(_seconds(context, "offload"), _seconds(context, "chosen"))
        if context.device.link_bytes is None:
            reason = "the link's rate is not known"
        elif any(mode != "keep" for mode in modes):
            reason = "recomputing takes less time"
        else:
            reason = "it fits without"
    unknown = "" if seconds is not None else "time: the rate of the link to the host is not known"
    return memory_option(
        context, name, taken, {"train": saves}, reason, seconds=seconds, costs="copies", unknown=unknown
    )


def _accumulation(context: OptionContext) -> MemoryOption:
    name, tried = validation_policies.ACCUMULATION, context.beside.micro
    taken = len(context.found.geometry.micro_batches[0]) > 1
    other = "at once" if taken else "split"
    if not taken and other not in tried:
        return memory_option(context, name, False, {}, "a micro-batch cannot be smaller", seconds=0.0)
    train, seconds = context.train_saves(micro=other), more(_seconds(context, other), _seconds(context, "chosen"))
    validate, why = _validate_resized(context)
    saves = {"train": train, **({"validate": validate} if "validate" in context.phases else {})}
    reason = f"the global batch fits at once; so much is of {context.beside.split_in}"
    if taken:
        saves, seconds = {phase: _negative(nbytes) for phase, nbytes in saves.items()}, _negative_seconds(seconds)
        reason = "a window takes the least time so"
    unknown = NOT_TRACED if train is None else why or _no_rates(context, seconds)
    return memory_option(context, name, taken, saves, reason, seconds=seconds, unknown=unknown)


def _validate_resized(context: OptionContext) -> tuple[int | None, str]:
    """(by how much validation's peak falls with the other micro-batch; why that is not known)."""
    follows = validation_policies.can_be_smaller(context.job) and context.whole.how.validation.items is None
    if not follows or "validate" not in context.phases:
        return 0, ""
    found = context.whole.beyond.get(
        validation_policies.ACCUMULATION, "bytes: it was not traced behind state that was moved aside"
    )
    if isinstance(found, str) or found.peak is None:
        return None, found if isinstance(found, str) else NOT_TRACED
    return context.peaks["validate"] - found.peak, ""


def _precision(context: OptionContext) -> MemoryOption:
    """Autocast, or its absence: what products leave for the backward is half as large."""
    job = context.job
    taken = job.precision != "fp32"
    other = validation_policies.other_precision(job)
    train = context.train_saves(micro="precision")
    validate, why = _validate_in_other(context)
    seconds = more(_seconds(context, "precision"), _seconds(context, "chosen"))
    saves: dict[str, int | None] = {"train": train, **({"validate": validate} if "validate" in context.phases else {})}
    if taken:
        saves, seconds = {phase: _negative(nbytes) for phase, nbytes in saves.items()}, _negative_seconds(seconds)
        reason = "it was allowed or asked for" if type(job).precision == "fp32" else "the job's own"
    elif other == "bf16" and context.device.is_cuda and (context.device.compute_capability or (8, 0)) < (8, 0):
        reason = "the card has no units for bf16"
    else:
        reason = "--keep precision" if "precision" in context.keep else "--allow precision takes it"
    unknown = "; ".join(dict.fromkeys(filter(None, [context.beside.unknown.get("precision", ""), why])))
    if seconds is None and not unknown:
        unknown = "time: another precision is timed on cards alone"
    changes = not taken or type(job).precision == "fp32"
    name = f"{job.precision if taken else other} autocast"
    return memory_option(
        context, name, taken, saves, reason, seconds=seconds, changes_learning=changes, unknown=unknown
    )  # fmt: skip


def _validate_in_other(context: OptionContext) -> tuple[int | None, str]:
    """(by how much validation's peak falls in the other precision; why that is not known)."""
    if "validate" not in context.phases:
        return 0, ""
    found = context.whole.beyond.get(
        validation_policies.PRECISION, "it was not traced behind state that was moved aside"
    )
    if isinstance(found, str):
        return None, found
    return (None if found.peak is None else context.peaks["validate"] - found.peak), ""


def _seconds(context: OptionContext, name: str) -> float | None:
    found = context.beside.micro.get(name)
    return found.seconds if found else None


def _negative_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else -seconds


def _negative(nbytes: int | None) -> int | None:
    return None if nbytes is None else -nbytes


def _no_rates(context: OptionContext, seconds: float | None) -> str:
    if seconds is not None:
        return ""
    return (
        "time: the card's rates are not known" if context.device.is_cuda else "time: it was not run on this processor"
    )
