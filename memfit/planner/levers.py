"""Levers: what a plan could do, what each saves and costs, whether it changes what is learned, and why it was taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from memfit.apply.implementation import implementation_of, supports
from memfit.apply.rig import is_trained
from memfit.apply.streaming import left_on_the_device
from memfit.device.catalogue import Device
from memfit.events import TO_DEVICE
from memfit.job import Job, Nets
from memfit.plan import Lever
from memfit.planner import host_state, phase_room
from memfit.planner.drafts import Drafts, unlimited
from memfit.planner.levers_validation import made, of_validation
from memfit.planner.predict import footprint_on, plain_nets
from memfit.planner.varied import EXPANDABLE
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
        *_allocator(found),
        *_buckets(found, gradients, one=one),
        *_ema(job, how, found, nets, link),
        *_checkpointing(found, own, drafted, keep),
        _offload(found, drafted, link, cuda=device.is_cuda),
        _accumulation(found, drafted),
        *of_validation(job, found, how, gradients),
        _state_on_host(job, device, how, found, nets, drafted),
        made(
            "8-bit optimizer", False, {"train": state - state // 4}, "nothing noticeable",
            "a job that has it as a setting takes it with --set", changes_learning=True,
        ),
        _sharding(found, gradients, state),
        _precision(job, found, keep),
    ]  # fmt: skip


def traced(drafts: Drafts) -> dict[str, int]:
    """Bytes of an optimizer's step: ``step own``, as the job has it, ``step fused`` and ``step foreach``, where there
    are such; and ``own fused`` or ``own foreach`` is 1 where the job's own is one."""
    job, cuda = drafts.job, drafts.device.is_cuda
    own = {implementation_of(optimizer, cuda) for optimizer in job.optimizers(plain_nets(job)).values()} - {None}
    kinds = {"own": next(iter(own)) if len(own) == 1 else "job", "fused": "fused", "foreach": "foreach"}
    found = {f"own {kind}": 1 for kind in own}
    for name, kind in kinds.items():
        step = drafts.fitting.optimizer_step(kind or "job")
        if step is not None:
            if name == "own":
                crossing = np.isin(np.array(step.trace.names), TO_DEVICE)[step.trace.operator_name]
                found["state on the host"] = int(step.trace.operator_bytes[crossing].sum())
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


def _optimizer(job: Job, how: Tracing, drafted: Mapping[str, int], keep: Collection[str]) -> list[Lever]:
    own = drafted.get("step own")
    if own is None:
        return []
    found = []
    for kind, costs, why in (
        ("foreach", "nothing", "all tensors at once, with temporaries as large as the parameters"),
        ("fused", "nothing", "the same rule in one kernel, without temporaries"),
    ):
        if f"step {kind}" not in drafted:
            continue
        taken = how.implementation == kind or (how.implementation == "job" and drafted.get(f"own {kind}") == 1)
        if taken:
            reason = why if how.implementation == kind else "the job's own"
        elif "optimizer" in keep:
            reason = "--keep optimizer"
        elif how.implementation == "fused":
            reason = f"the fused one does the same in {format_size(drafted['step fused'])}"
        else:
            reason = "on this device it is no faster"
        name = {"foreach": "for-each optimizer", "fused": "fused optimizer"}[kind]
        found.append(made(name, taken, {"train": own - drafted[f"step {kind}"]}, costs, reason, seconds=0.0))
    return found


def _buckets(found: Candidate, gradients: int, *, one: bool) -> list[Lever]:
    saves = dict.fromkeys(found.footprint.phases, gradients)
    twice = "DDP's buckets hold every gradient a second time"
    return [
        made("no DDP for one device", one, saves, "nothing", twice if one else "there are several", seconds=0.0),
        made(
            "gradients as bucket views", not one, {} if one else saves, "nothing",
            "without DDP there are no buckets" if one else twice, seconds=0.0,
        ),
    ]  # fmt: skip


def _allocator(found: Candidate) -> list[Lever]:
    """Expandable segments, which have no blocks that other sizes cannot use."""
    if found.allocator_bytes is None:
        return []
    taken = found.allocator != "default"
    reason = "without, a window asks for what lies in fragments" if taken else "it fits without"
    return [made(EXPANDABLE, taken, {"train": found.allocator_bytes}, "nothing", reason, seconds=0.0)]


def _sharding(found: Candidate, gradients: int, state: int) -> Lever:
    """Of parameters, gradients and optimizer state over ranks, of which each then holds its part."""
    ranks = found.geometry.data_parallel
    whole = found.footprint.phases["train"].categories["parameters"] + gradients + state
    if ranks == 1:
        reason = "one device has nobody to share with; with --devices 2 each would hold half"
        return made("sharding", False, {}, "weights gathered before each use", reason)
    if found.engine not in ("single", "ddp"):
        parts = found.footprint.phases["train"].categories
        less = (ranks - 1) * state + sum(max(gradients - parts[name], 0) for name in ("parameters", "gradients"))
        held = dict.fromkeys(found.footprint.phases, less)
        why = f"{found.engine}: the reasons say what each engine comes to"
        return made("sharding", True, held, "weights or gradients sent between ranks", why)
    reason = "whole copies fit, and nothing has to be gathered; memfit predict --engine fsdp2 has its bytes"
    saves = dict.fromkeys(found.footprint.phases, whole - whole // ranks)
    return made("sharding", False, saves, "weights gathered before each use", reason)


def _offload(found: Candidate, drafted: Mapping[str, int], link: float | None, *, cuda: bool) -> Lever:
    """Of what the blocks keep for the backward, all of it or that of the modules which were chosen."""
    modes = list(found.checkpointing.values())
    taken, kept = "offload" in modes, drafted.get("activations", 0)
    seconds = None if link is None else 2 * kept * len(found.geometry.micro_batches[0]) / link
    if not cuda:
        return made("offload of saved activations", False, {}, "copies", "the host is the device", seconds=None)
    if taken:
        reason = f"{modes.count('offload')} modules: recomputing them takes longer, or more memory"
    elif link is None:
        reason = "the link's rate is not known"
    else:
        reason = "recomputing takes less time" if any(mode != "keep" for mode in modes) else "it fits without"
    return made(
        "offload of saved activations", taken, {"train": kept}, _copies(2 * kept, link, "micro-batch"), reason,
        seconds=seconds,
    )  # fmt: skip


def _state_on_host(
    job: Job, device: Device, how: Tracing, found: Candidate, nets: Nets, drafted: Mapping[str, int]
) -> Lever:
    """Optimizers' state between steps."""
    taken, link = how.optimizer_state == "host", device.link_bytes
    state = found.footprint.phases["train"].categories["optimizer"]
    if taken:
        state = drafted.get("state on the host", 0)
        left = left_on_the_device(job.optimizers(nets))
        reason = "nothing fits without"
        reason += f"; the state of {', '.join(left)} stays" if left else ""
    else:
        reason = host_state.why_not(job, nets, device, found.engine)
    return made(
        "optimizer state on the host", taken, dict.fromkeys(found.footprint.phases, state), _copies(2 * state, link),
        reason, seconds=None if link is None else 2 * state / link,
    )  # fmt: skip


def _ema(job: Job, how: Tracing, found: Candidate, nets: Nets, link: float | None) -> list[Lever]:
    if job.ema is None:
        name, why = "average of the weights on the host", "the job keeps no average"
        return [made(name, False, {}, "copies", why)]
    taken = how.average == "host"
    average = sum(t.nbytes for net in nets.values() if is_trained(net) for t in (*net.parameters(), *net.buffers()))
    reason = "nothing fits without" if taken else "it fits without"
    return [
        made(
            "average of the weights on the host", taken, dict.fromkeys(found.footprint.phases, average),
            _copies(2 * average, link), reason, seconds=None if link is None else 2 * average / link,
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
    return [made(name, recomputed, {"train": saves}, costs, reason, seconds=seconds if recomputed else None)]


def _accumulation(found: Candidate, drafted: Mapping[str, int]) -> Lever:
    taken = len(found.geometry.micro_batches[0]) > 1
    saves = drafted.get("at once", 0) - drafted.get("chosen", 0) if taken else 0
    reason = "a window takes the least time so" if taken else "the global batch fits at once"
    return made("accumulation", taken, {"train": saves}, "smaller kernels", reason)


def _precision(job: Job, found: Candidate, keep: Collection[str]) -> Lever:
    """Half precision under autocast: what products leave for the backward is half as large."""
    train = found.footprint.phases["train"].categories
    if job.precision != "fp32":
        allowed = type(job).precision == "fp32"
        reason = "it was allowed or asked for" if allowed else "the job's own"
        return made(
            f"{job.precision} autocast", True, {"train": train["activations"]}, "nothing", reason,
            changes_learning=allowed,
        )  # fmt: skip
    reason = "--keep precision" if "precision" in keep else "--allow precision takes it"
    return made("bf16 autocast", False, {"train": train["activations"] // 2}, "nothing", reason, changes_learning=True)


def _copies(nbytes: int, link: float | None, each: str = "window") -> str:
    return "copies of unknown time" if link is None else f"{1000 * nbytes / link:.0f} ms of copies a {each}"
