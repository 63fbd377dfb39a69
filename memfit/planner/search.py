"""The search for a plan: the largest micro-batch that fits, accumulation to the exact global batch, recompute last.

Policies are tried in the order of what they cost: the job's own checkpointing, then everything that can be recomputed.
Within one, a smaller micro-batch with accumulation comes before the next policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from memfit.device.catalogue import Device
from memfit.footprint import Footprint
from memfit.geometry import Geometry, shape_of, split
from memfit.job import Job
from memfit.plan import Lever, Plan
from memfit.planner.predict import checkpoint_all, default_checkpointing, footprint_on, plain_nets
from memfit.planner.saving import choose_writing
from memfit.planner.timing import window_seconds
from memfit.sizes import format_size
from memfit.trace.step import Tracing, trace_family, trace_job

RECOMPUTED = "every block recomputed"
HOST_MARGIN_BYTES, HOST_MARGIN = 24 << 20, 0.02
"""Of a CPU's budget, left for what is no tensor: f5_tts/tiny needs 12 to 24 MiB beyond (bench/host_margin.py)."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the global batch, replayed."""

    policy: str
    checkpointing: Mapping[str, str]
    geometry: Geometry
    footprint: Footprint
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan (None where nothing fits), the floor that was reached, and the ways beside it."""

    plan: Plan | None
    chosen: Candidate | None
    floor: Candidate
    alternatives: tuple[Candidate, ...]
    seconds: float


def find_plan(
    job: Job,
    name: str,
    global_batch: int,
    device: Device,
    *,
    micro_batch: int | None = None,
    devices: int = 1,
    seed: int = 0,
) -> Answer:
    """The first policy under which the global batch fits, with its largest micro-batch.

    Args:
        micro_batch: fixes that choice, in units.
        devices: data-parallel ranks.
    """
    begin = time.perf_counter()
    job = type(job)(**{**job.settings(), "wrapper": "none"})
    card, device = device, _less_host_margin(device)
    nets = plain_nets(job)
    own, everything = default_checkpointing(job, nets), checkpoint_all(job, nets)
    policies = {"the job's own checkpointing": own}
    if everything != own:
        policies[RECOMPUTED] = everything
    tried: list[Candidate] = []
    for policy, modes in policies.items():
        tried.append(_largest(job, policy, modes, global_batch, device, micro_batch, devices))
        if tried[-1].footprint.fits:
            break
    chosen = tried[-1] if tried[-1].footprint.fits else None
    floor = min(tried, key=lambda candidate: _process_bytes(candidate.footprint))
    plan, beside = None, []
    if chosen is not None:
        same = chosen.geometry.micro_batch
        others = [(policy, modes) for policy, modes in policies.items() if policy != chosen.policy]
        beside = [_largest(job, policy, modes, global_batch, device, same, devices) for policy, modes in others]
        plan = _plan(job, name, card, chosen, beside, own, seed)
        writing = choose_writing(chosen.footprint, device)
        chosen = replace(chosen, footprint=writing.footprint)
        plan = replace(
            plan,
            checkpoint_writing=writing.how,
            reasons={**plan.reasons, "checkpoint_writing": writing.reason},
            phases={phase: asdict(value) for phase, value in writing.footprint.phases.items()},
        )
    return Answer(
        plan=plan,
        chosen=chosen,
        floor=floor,
        alternatives=tuple(c for c in beside if c.footprint.fits),
        seconds=time.perf_counter() - begin,
    )


def _less_host_margin(device: Device) -> Device:
    """On a CPU the budget also holds what is no tensor: Python's objects, autograd's graph, the heap's gaps."""
    if device.is_cuda or device.usable_bytes is None:
        return device
    return replace(
        device, usable_bytes=max(device.usable_bytes - HOST_MARGIN_BYTES - int(device.usable_bytes * HOST_MARGIN), 1)
    )


def _largest(
    job: Job, policy: str, modes: Mapping[str, str], global_batch: int, device: Device, fixed: int | None, devices: int
) -> Candidate:
    """The largest micro-batch that fits under one policy; where none does, the smallest, which does not."""
    share, budget = -(-global_batch // devices), device.usable_bytes or 0
    smallest = min(job.longest or 1, share)

    def at(micro: int) -> Candidate:
        geometry = split(global_batch, micro, job.unit, devices)
        count = len(geometry.micro_batches[0])
        how = Tracing(device=device, micro_batches=count, checkpointing=modes)
        trace = trace_job(job, shape_of(job, micro), how)
        return Candidate(
            policy=policy,
            checkpointing=modes,
            geometry=geometry,
            footprint=footprint_on(trace, device),
            seconds=window_seconds(trace, device, count),
        )

    if fixed is not None:
        return at(min(fixed, share))
    whole = at(share)
    if whole.footprint.fits or share == smallest:
        return whole
    family = trace_family(job, Tracing(device=device, micro_batches=2, checkpointing=modes), shape_of(job, smallest))

    def derived(micro: int, on: Device) -> Footprint:
        return footprint_on(family.bound(shape_of(job, micro)), on)

    highest = _last_true(lambda micro: derived(micro, device).fits, smallest, share - 1)
    found = {highest: at(highest)}

    def fits(micro: int) -> bool:
        if micro not in found:
            found[micro] = at(micro)
        return found[micro].footprint.fits

    if not fits(highest) and highest > smallest:
        unlimited = replace(device, usable_bytes=1 << 60)
        scratch = _process_bytes(found[highest].footprint) - _process_bytes(derived(highest, unlimited))
        expected = _last_true(
            lambda micro: _process_bytes(derived(micro, unlimited)) + scratch * micro / highest <= budget,
            smallest,
            highest - 1,
        )
        _close_in(fits, smallest, expected, highest)
    fitting = [micro for micro, candidate in found.items() if candidate.footprint.fits]
    return found[max(fitting)] if fitting else at(smallest)


def _process_bytes(found: Footprint) -> int:
    return found.phases[found.limiting_phase].process_bytes


def _close_in(fits: Callable[[int], bool], smallest: int, start: int, high: int) -> None:
    """Tries numbers below ``high``, which fails, until the largest that passes is known to a hundredth."""
    low, step = None, 1
    tolerance = max(high // 128, 1)
    while low is None:
        if fits(start):
            low = start
        elif start == smallest:
            return
        else:
            high, start, step = start, max(start - step, smallest), step * 2
    step = 1
    while high - low > tolerance:
        middle = min(low + step, (low + high) // 2)
        if fits(middle):
            low, step = middle, step * 2
        else:
            high, step = middle, 1


def _last_true(test: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in [low, high] that passes, taking the test as monotone; ``low`` where none does."""
    if high <= low or test(high):
        return max(high, low)
    while high - low > 1:
        middle = (low + high) // 2
        if test(middle):
            low = middle
        else:
            high = middle
    return low


def _plan(
    job: Job, name: str, device: Device, chosen: Candidate, beside: list[Candidate], own: Mapping[str, str], seed: int
) -> Plan:
    geometry, found = chosen.geometry, chosen.footprint
    budget = device.usable_bytes or 0
    accumulates = len(geometry.micro_batches[0]) > 1
    micro_reason = (
        "the whole global batch fits at once"
        if not accumulates
        else f"the largest that fits {format_size(budget)}; the rest is accumulated"
    )
    reasons = {
        "micro_batch": micro_reason,
        "checkpointing": "the job's own fits"
        if dict(chosen.checkpointing) == dict(own)
        else "nothing fits without recomputing, even at the smallest micro-batch",
        "precision": "the job's own; another would change what is learned",
        "engine": "one device"
        if geometry.data_parallel == 1
        else f"{geometry.data_parallel} devices with the same weights",
    }
    return Plan(
        job=name,
        settings=job.settings(),
        device=device.key,
        budget_bytes=budget,
        unit=job.unit,
        global_batch=geometry.global_batch,
        micro_batch=geometry.micro_batch,
        micro_batches=[list(rank) for rank in geometry.micro_batches],
        arithmetic=geometry.arithmetic(),
        engine="single" if geometry.data_parallel == 1 else "ddp",
        precision=job.precision,
        seed=seed,
        checkpointing=dict(chosen.checkpointing),
        reasons=reasons,
        levers=_levers(chosen, beside, accumulates),
        phases={phase: asdict(value) for phase, value in found.phases.items()},
        step_seconds=chosen.seconds,
    )


def _levers(chosen: Candidate, beside: list[Candidate], accumulates: bool) -> list[Lever]:
    """What was taken and left; bytes are of training's peak at the chosen micro-batch."""

    def peak(candidate: Candidate) -> int:
        return candidate.footprint.phases["train"].allocated_bytes

    reason = "the global batch does not fit at once" if accumulates else "the global batch fits at once"
    levers = [Lever(name="accumulation", taken=accumulates, saves_bytes=0, costs="smaller kernels", reason=reason)]
    for candidate in beside:
        taken = chosen.policy == RECOMPUTED
        reason = "nothing fits without it" if taken else "it fits without"
        saves = max(peak(candidate) - peak(chosen) if taken else peak(chosen) - peak(candidate), 0)
        levers.append(
            Lever(
                name="recompute every block",
                taken=taken,
                saves_bytes=saves,
                costs="about one more forward",
                reason=reason,
            )
        )
    return levers


def plan_json(answer: Answer) -> dict[str, Any]:
    """The JSON of DESIGN.md."""
    found: dict[str, Any] = {"fits": answer.plan is not None}
    shown = answer.chosen or answer.floor
    geometry, replayed = shown.geometry, shown.footprint
    if answer.plan is not None:
        found |= asdict(answer.plan)
    found |= {
        "verdict": replayed.verdict,
        "global_batch": geometry.global_batch,
        "micro_batch": geometry.micro_batch,
        "micro_batches": list(geometry.micro_batches[0]),
        "data_parallel": geometry.data_parallel,
        "engine": "single" if geometry.data_parallel == 1 else "ddp",
        "checkpointing": dict(shown.checkpointing),
        "levers": [asdict(lever) for lever in answer.plan.levers] if answer.plan else [],
        "phases": {phase: asdict(value) for phase, value in replayed.phases.items()},
        "step_seconds": shown.seconds,
        "failed_request": asdict(replayed.failed_request) if replayed.failed_request else None,
        "headroom_bytes": replayed.headroom_bytes,
    }
    found["alternatives"] = [
        {
            "policy": c.policy,
            "micro_batch": c.geometry.micro_batch,
            "arithmetic": c.geometry.arithmetic(),
            "step_seconds": c.seconds,
            "allocated_bytes": c.footprint.phases["train"].allocated_bytes,
        }
        for c in answer.alternatives
    ]
    found["learning_rate"] = {
        "rule": "none",
        "factor": 1.0,
        "reason": "the global batch is the one that was asked for; the rate stays as the job sets it",
    }
    found["seconds"] = answer.seconds
    return found
