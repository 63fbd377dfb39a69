"""Levers: what a plan could do, what each saves and costs, whether it changes what is learned, and why it was taken.

A lever that was taken saves what each phase's peak would rise by without it, one that was left what the peak would fall
by with it; the rest of the plan stays. Peaks are of tensors' bytes, from traces of the plan and of what lies beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.apply.implementation import implementation_of, supports
from memfit.device.catalogue import Device
from memfit.job import Job, Nets
from memfit.plan import Lever
from memfit.planner import phase_room
from memfit.planner.beside import KINDS
from memfit.planner.case import Case, lever, more
from memfit.planner.levers_sharding import sharding
from memfit.planner.levers_state import average_on_host, eight_bit, state_on_host
from memfit.planner.levers_validation import of_validation
from memfit.planner.varied import EXPANDABLE
from memfit.planner.whole import Candidate
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


def describe(case: Case) -> list[Lever]:
    """Every lever of a plan."""
    return [
        *_optimizer(case),
        *_allocator(case),
        *_buckets(case),
        average_on_host(case),
        _checkpointing(case),
        _offload(case),
        _accumulation(case),
        *of_validation(case),
        state_on_host(case),
        eight_bit(case),
        sharding(case),
        _precision(case),
    ]


def reasons(chosen: Candidate, own: Mapping[str, str], device: Device, how: Tracing) -> dict[str, str]:
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
        "validation": "; ".join(phase_room.words(how.validation, {})) or "as the job has it",
    }


def _optimizer(case: Case) -> list[Lever]:
    """Left out: the counts of steps that a fused one keeps on the card, 512 bytes a tensor."""
    steps, own, how = case.beside.steps, case.beside.own_kinds, case.whole.how
    found = []
    for kind, name, why in zip(
        KINDS,
        ("for-each optimizer", "fused optimizer"),
        ("all tensors at once, with temporaries as large as the parameters", "the same rule in one kernel"),
        strict=True,
    ):
        if kind not in steps:
            lacks = case.beside.lacking or "one of the optimizers"
            found.append(lever(case, name, False, {}, f"{lacks} has no such implementation", seconds=0.0))
            continue
        taken = how.implementation == kind or (how.implementation == "job" and own == {kind})
        saves = case.train_saves(step="own" if taken else kind)
        if taken:
            reason = why if how.implementation == kind else "the job's own"
            seconds = more(steps["chosen"].seconds, steps["own"].seconds if "own" in steps else None)
        else:
            seconds = more(steps[kind].seconds, steps["chosen"].seconds)
            if "optimizer" in case.keep:
                reason = "--keep optimizer"
            elif how.implementation == "fused":
                reason = "the fused one does the same without temporaries"
            else:
                reason = "the job's own is kept on this device"
        saves = -saves if taken and saves is not None else saves
        unknown = "" if seconds is not None else "time: other implementations are timed on cards alone"
        unknown = NOT_TRACED if saves is None else unknown
        found.append(lever(case, name, taken, {"train": saves}, reason, seconds=seconds, unknown=unknown))
    return found


def _buckets(case: Case) -> list[Lever]:
    """DistributedDataParallel's buckets are as large as the gradients, and stay for the whole run."""
    one, ddp = case.found.geometry.data_parallel == 1, case.found.engine == "ddp"
    twice = "DDP's buckets hold every gradient a second time"
    without = "without DDP there are no buckets"
    saves = case.all_phases(case.gradients)
    return [
        lever(
            case, "no DDP for one device", one, saves if one else {}, twice if one else "there are several devices",
            seconds=0.0,
        ),
        lever(
            case, "gradients as bucket views", ddp, saves if ddp else {}, twice if ddp else without, seconds=0.0
        ),
    ]  # fmt: skip


def _allocator(case: Case) -> list[Lever]:
    """Expandable segments, which have no blocks that other sizes cannot use: reserved bytes, of each phase's."""
    if not case.found.allocator_bytes:
        return []
    taken = case.found.allocator != "default"
    reason = "without, a window asks for what lies in fragments" if taken else "it fits without"
    return [lever(case, EXPANDABLE, taken, case.found.allocator_bytes, reason, seconds=0.0)]


def _checkpointing(case: Case) -> Lever:
    """Of the modules that were chosen, or of every block where none was."""
    modes, tried = case.found.checkpointing, case.beside.micro
    recomputed = any(mode != "keep" for mode in modes.values())
    kinds = sorted({mode for mode in modes.values() if mode != "keep"})
    name = f"checkpointing by module ({', '.join(kinds)})" if kinds else "checkpointing by module"
    if "checkpointing" in case.keep:
        reason = "--keep checkpointing: the job's own"
    elif recomputed:
        reason = f"everything kept would take {format_size(case.beside.kept_bytes)}"
    elif "full" not in tried:
        return lever(case, name, False, {}, "the nets have no blocks that could be recomputed", seconds=0.0)
    else:
        reason = "it fits without"
    if recomputed:
        saves = _negative(case.train_saves(micro="keep"))
        seconds = more(_seconds(case, "chosen"), _seconds(case, "keep"))
    else:
        saves = case.train_saves(micro="full")
        seconds = more(_seconds(case, "full"), _seconds(case, "chosen"))
    unknown = NOT_TRACED if saves is None else _no_rates(case, seconds)
    return lever(case, name, recomputed, {"train": saves}, reason, seconds=seconds, unknown=unknown)


def _offload(case: Case) -> Lever:
    """Of what every block keeps for the backward, or of the modules that were chosen, with all else kept."""
    name, tried = "offload of saved activations", case.beside.micro
    modes = list(case.found.checkpointing.values())
    if not case.device.is_cuda:
        return lever(case, name, False, {}, "the host is the device", seconds=0.0)
    if "offload" not in tried:
        return lever(case, name, False, {}, "the nets have no blocks whose activations could be moved", seconds=0.0)
    taken = "offload" in modes
    if taken:
        reason = f"{modes.count('offload')} of the modules: recomputing them takes longer, or more memory"
        saves, seconds = (
            _negative(case.train_saves(micro="keep")),
            more(_seconds(case, "chosen"), _seconds(case, "keep")),
        )
    else:
        saves = case.train_saves(micro="offload")
        seconds = more(_seconds(case, "offload"), _seconds(case, "chosen"))
        if case.device.link_bytes is None:
            reason = "the link's rate is not known"
        elif any(mode != "keep" for mode in modes):
            reason = "recomputing takes less time"
        else:
            reason = "it fits without"
    unknown = "" if seconds is not None else "time: the rate of the link to the host is not known"
    return lever(case, name, taken, {"train": saves}, reason, seconds=seconds, costs="copies", unknown=unknown)


def _accumulation(case: Case) -> Lever:
    name, tried = phase_room.ACCUMULATION, case.beside.micro
    taken = len(case.found.geometry.micro_batches[0]) > 1
    other = "at once" if taken else "split"
    if not taken and other not in tried:
        return lever(case, name, False, {}, "a micro-batch cannot be smaller", seconds=0.0)
    train, seconds = case.train_saves(micro=other), more(_seconds(case, other), _seconds(case, "chosen"))
    validate, why = _validate_resized(case)
    saves = {"train": train, **({"validate": validate} if "validate" in case.phases else {})}
    reason = f"the global batch fits at once; so much is of {case.beside.split_in}"
    if taken:
        saves, seconds = {phase: _negative(nbytes) for phase, nbytes in saves.items()}, _negative_seconds(seconds)
        reason = "a window takes the least time so"
    unknown = NOT_TRACED if train is None else why or _no_rates(case, seconds)
    return lever(case, name, taken, saves, reason, seconds=seconds, unknown=unknown)


def _validate_resized(case: Case) -> tuple[int | None, str]:
    """(by how much validation's peak falls with the other micro-batch; why that is not known)."""
    follows = phase_room.can_be_smaller(case.job) and case.whole.how.validation.items is None
    if not follows or "validate" not in case.phases:
        return 0, ""
    found = case.whole.beyond.get(phase_room.ACCUMULATION, "bytes: it was not traced behind state that was moved aside")
    if isinstance(found, str) or found.peak is None:
        return None, found if isinstance(found, str) else NOT_TRACED
    return case.peaks["validate"] - found.peak, ""


def _precision(case: Case) -> Lever:
    """Autocast, or its absence: what products leave for the backward is half as large."""
    job = case.job
    taken = job.precision != "fp32"
    other = phase_room.other_precision(job)
    train = case.train_saves(micro="precision")
    validate, why = _validate_in_other(case)
    seconds = more(_seconds(case, "precision"), _seconds(case, "chosen"))
    saves: dict[str, int | None] = {"train": train, **({"validate": validate} if "validate" in case.phases else {})}
    if taken:
        saves, seconds = {phase: _negative(nbytes) for phase, nbytes in saves.items()}, _negative_seconds(seconds)
        reason = "it was allowed or asked for" if type(job).precision == "fp32" else "the job's own"
    elif other == "bf16" and case.device.is_cuda and (case.device.compute_capability or (8, 0)) < (8, 0):
        reason = "the card has no units for bf16"
    else:
        reason = "--keep precision" if "precision" in case.keep else "--allow precision takes it"
    unknown = "; ".join(dict.fromkeys(filter(None, [case.beside.unknown.get("precision", ""), why])))
    if seconds is None and not unknown:
        unknown = "time: another precision is timed on cards alone"
    changes = not taken or type(job).precision == "fp32"
    name = f"{job.precision if taken else other} autocast"
    return lever(
        case, name, taken, saves, reason, seconds=seconds, changes_learning=changes, unknown=unknown
    )  # fmt: skip


def _validate_in_other(case: Case) -> tuple[int | None, str]:
    """(by how much validation's peak falls in the other precision; why that is not known)."""
    if "validate" not in case.phases:
        return 0, ""
    found = case.whole.beyond.get(phase_room.PRECISION, "it was not traced behind state that was moved aside")
    if isinstance(found, str):
        return None, found
    return (None if found.peak is None else case.peaks["validate"] - found.peak), ""


def _seconds(case: Case, name: str) -> float | None:
    found = case.beside.micro.get(name)
    return found.seconds if found else None


def _negative_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else -seconds


def _negative(nbytes: int | None) -> int | None:
    return None if nbytes is None else -nbytes


def _no_rates(case: Case, seconds: float | None) -> str:
    if seconds is not None:
        return ""
    return "time: the card's rates are not known" if case.device.is_cuda else "time: it was not run on this processor"
