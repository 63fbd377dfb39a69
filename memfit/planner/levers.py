"""Levers: what a plan could do, what each saves and costs, whether it changes what is learned, and why it was taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from memfit.apply.implementation import implementation_of, supports
from memfit.apply.rig import is_trained
from memfit.device.catalogue import Device
from memfit.job import Job, Nets
from memfit.plan import Lever
from memfit.planner import phase_room
from memfit.planner.drafts import Drafts, unlimited
from memfit.planner.predict import footprint_on, plain_nets
from memfit.sizes import format_size
from memfit.trace.step import Tracing

if TYPE_CHECKING:
    from memfit.planner.search import Candidate


def implementation(job: Job, device: Device) -> str:
    """``fused`` on a card where it takes another way than the job's and every optimizer can; else the job's own."""
    if not device.is_cuda:
        return "job"
    nets = plain_nets(job)
    optimizers = job.optimizers(nets).values()
    now = {implementation_of(optimizer, cuda=True) for optimizer in optimizers if supports(optimizer, "foreach")}
    can = all(supports(optimizer, "fused") for optimizer in optimizers if supports(optimizer, "foreach"))
    return "fused" if can and now - {"fused"} else "job"


def describe(
    job: Job, device: Device, how: Tracing, found: Candidate, own: Mapping[str, str], nets: Nets,
    keep: Collection[str], drafted: Mapping[str, int],
) -> list[Lever]:  # fmt: skip
    """Every lever of a plan.

    Args:
        drafted: bytes that were traced on the way, see ``traced`` and ``Drafts.around``.
    """
    gradients = sum(
        p.numel() * p.itemsize for net in nets.values() if is_trained(net) for p in net.parameters() if p.requires_grad
    )
    train = found.footprint.phases["train"]
    state = train.categories["optimizer"]
    one = found.geometry.data_parallel == 1
    link = device.link_bytes
    return [
        *_optimizer(job, how, drafted, keep),
        _lever(
            "no DDP for one device" if one else "gradients as bucket views", True,
            {"train": gradients, "validate": gradients, "save": gradients}, "nothing",
            "DDP's buckets hold every gradient a second time", seconds=0.0,
        ),
        *_ema(job, found, link),
        *_checkpointing(found, own, drafted, keep),
        _accumulation(found, drafted),
        *_validation(job, how, gradients, state),
        _lever(
            "optimizer state on the host", False, {"train": state}, _copies(2 * state, link),
            "what fits without it is faster", seconds=None if link is None else 2 * state / link,
        ),
        _lever(
            "8-bit optimizer", False, {"train": state - state // 4}, "nothing noticeable",
            "it changes what is learned; a job that has it as a setting takes it with --set", changes_learning=True,
        ),
        *_precision(job),
    ]  # fmt: skip


def traced(drafts: Drafts) -> dict[str, int]:
    """Bytes of an optimizer's step: ``step own``, as the job has it, and ``step fused``, where there is such a one."""
    session = drafts.fitting.session
    rig = session.rig
    cuda = drafts.device.is_cuda
    own = {implementation_of(optimizer, cuda) for optimizer in rig.job.optimizers(rig.nets).values()} - {None}
    kinds = {"own": next(iter(own)) if len(own) == 1 else "job", "fused": "fused"}
    found = {}
    for name, kind in kinds.items():
        step = session.optimizer_step(kind or "job")
        if step is not None:
            found[f"step {name}"] = footprint_on(step.trace, unlimited(drafts.device)).phases["train"].allocated_bytes
    return found


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
        why = f"{recomputed} modules recompute: the least time in which the micro-batch fits"
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
        "validation": "; ".join(phase_room.words(how.validation, {})) or "as the job has it",
    }


def _lever(
    name: str, taken: bool, saves: Mapping[str, int], costs: str, reason: str, *,
    seconds: float | None = None, changes_learning: bool = False,
) -> Lever:  # fmt: skip
    saves = {phase: max(nbytes, 0) for phase, nbytes in saves.items()}
    return Lever(
        name=name, taken=taken, saves_bytes=max(saves.values(), default=0), costs=costs, reason=reason, saves=saves,
        seconds=seconds, changes_learning=changes_learning,
    )  # fmt: skip


def _optimizer(job: Job, how: Tracing, drafted: Mapping[str, int], keep: Collection[str]) -> list[Lever]:
    own = drafted.get("step own")
    if own is None:
        return []
    fused = drafted.get("step fused", own)
    taken = how.implementation == "fused"
    if taken:
        reason = "the same rule in one kernel, without temporaries"
    elif "optimizer" in keep:
        reason = "--keep optimizer"
    else:
        reason = "the job's own takes no more" if own <= fused else "on this device it is no faster"
    return [_lever("fused optimizer", taken, {"train": own - fused}, "nothing", reason, seconds=0.0)]


def _ema(job: Job, found: Candidate, link: float | None) -> list[Lever]:
    average = found.footprint.phases["train"].categories["ema"]
    if not average:
        return []
    return [
        _lever(
            "average of the weights on the host", False, dict.fromkeys(found.footprint.phases, average),
            _copies(average, link), "what fits without it is faster",
            seconds=None if link is None else average / link,
        )
    ]  # fmt: skip


def _checkpointing(
    found: Candidate, own: Mapping[str, str], drafted: Mapping[str, int], keep: Collection[str]
) -> list[Lever]:
    kept, chosen = drafted.get("keep", 0), drafted.get("chosen", 0)
    recomputed = any(mode != "keep" for mode in found.checkpointing.values())
    if "checkpointing" in keep:
        reason = "--keep checkpointing: the job's own"
    elif recomputed:
        reason = f"everything kept would take {format_size(kept)}" if kept else "nothing fits without it"
    else:
        reason = "it fits without"
    costs = f"{drafted['more ms']} ms a window" if recomputed and "more ms" in drafted else "a part of one more forward"
    seconds = drafted["more ms"] / 1000 if "more ms" in drafted else None
    modes = sorted({mode for mode in found.checkpointing.values() if mode != "keep"})
    name = f"checkpointing by module ({', '.join(modes)})" if modes else "checkpointing by module"
    saves = kept - chosen if recomputed else kept - drafted.get("floor", kept)
    return [_lever(name, recomputed, {"train": saves}, costs, reason, seconds=seconds if recomputed else None)]


def _accumulation(found: Candidate, drafted: Mapping[str, int]) -> Lever:
    taken = len(found.geometry.micro_batches[0]) > 1
    saves = drafted.get("at once", 0) - drafted.get("chosen", 0) if taken else 0
    reason = "a window takes the least time so" if taken else "the global batch fits at once"
    return _lever("accumulation", taken, {"train": saves}, "smaller kernels", reason)


def _validation(job: Job, how: Tracing, gradients: int, state: int) -> list[Lever]:
    if not job.validates:
        return []
    live = gradients if job.zero_grad == "after_forward" else 0
    taken = phase_room.words(how.validation, job.validation_levers)
    left = "validation fits without"
    free = "gradients of the last window are of no use there" if live else "the job frees them after each step already"
    found = [
        _lever(
            "free gradients", how.validation.gradients == "free",
            {"validate": live, "save": live}, "nothing", free, seconds=0.0,
        )
    ]  # fmt: skip
    for name in job.validation_levers:
        found.append(_lever(name, name in taken, {}, "smaller kernels", _why(name in taken, left)))
    aside = "optimizer state aside in validation"
    found.append(_lever(aside, aside in taken, {"validate": state}, "two copies", _why(aside in taken, left)))
    skip = "skip validation"
    found.append(_lever(skip, skip in taken, {}, "no validation in the run", _why(skip in taken, left)))
    return found


def _why(taken: bool, left: str) -> str:
    return "validation does not fit without" if taken else left


def _precision(job: Job) -> list[Lever]:
    if job.precision != "fp32":
        return []
    reason = "it changes what is learned; --set precision=bf16 asks for it"
    return [_lever("bf16 autocast", False, {}, "nothing", reason, changes_learning=True)]


def _copies(nbytes: int, link: float | None) -> str:
    return "copies of unknown time" if link is None else f"{1000 * nbytes / link:.0f} ms of copies a window"
