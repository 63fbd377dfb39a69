"""The search for a plan: the fastest way to run the exact global batch that fits, and what lies beside it.

Free levers come first: they cost neither speed nor learning. Then micro-batch and checkpointing are chosen together, by
time: at a fixed global batch a smaller micro-batch that keeps everything is often faster than a larger one that
recomputes. Last comes room for validation and saving. The answer is traced whole and replayed before it is given.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memfit.device.catalogue import Device
from memfit.errors import InputError
from memfit.footprint import Footprint
from memfit.geometry import Geometry, shape_of
from memfit.job import Job, Shape
from memfit.plan import Lever, PhasePolicy, Plan
from memfit.planner import levers, phase_room
from memfit.planner.advice import Rate, learning_rate
from memfit.planner.drafts import Draft, Drafts
from memfit.planner.fitting import open_fitting
from memfit.planner.next_step import NextStep, next_step
from memfit.planner.predict import checkpoint_all, default_checkpointing, footprint_on, plain_nets
from memfit.trace.step import Tracing, trace_job

KEEP = ("checkpointing", "optimizer", "precision", "validation")
"""Choices that a person can leave as the job has them."""
HOST_MARGIN_BYTES, HOST_MARGIN = 24 << 20, 0.02
"""Of a CPU's budget, left for what is no tensor: f5_tts/tiny needs 12 to 24 MiB beyond (bench/host_margin.py)."""
ROUNDS = 3
"""Whole traces whose training is over the budget, before the search gives up."""


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
    alternatives: tuple[Draft, ...]
    next_step: NextStep | None = None
    learning_rate: Rate = field(default_factory=lambda: learning_rate(None, 1))
    seconds: float = 0.0


def find_plan(
    job: Job,
    name: str,
    global_batch: int,
    device: Device,
    *,
    micro_batch: int | None = None,
    devices: int = 1,
    seed: int = 0,
    keep: Collection[str] = (),
    tuned_for: int | None = None,
) -> Answer:
    """The fastest plan that fits.

    Args:
        micro_batch: fixes that choice, in units.
        devices: data-parallel ranks.
        keep: choices that stay as the job has them, of ``KEEP``.
        tuned_for: the global batch that the job's learning rate was tuned for.

    Raises:
        InputError: a word of ``keep`` that is no choice.
    """
    begin = time.perf_counter()
    _check_keep(keep)
    card, device = device, _less_host_margin(device)
    own = default_checkpointing(job, plain_nets(job))
    implementation = "job" if "optimizer" in keep else levers.implementation(job, device)
    how = Tracing(device=device, implementation=implementation, validation=PhasePolicy(), saving=PhasePolicy())
    budget, found = device.usable_bytes or 0, None
    for _ in range(ROUNDS):
        draft, drafts = _drafted(
            job, how, replace(device, usable_bytes=budget), global_batch, devices, micro_batch,
            own if "checkpointing" in keep else None,
        )  # fmt: skip
        beside, step, drafted = drafts
        found, how = _whole(job, how, device, draft, own, may_choose="validation" not in keep)
        if found.footprint.fits or not draft.fits or found.footprint.limiting_phase != "train":
            break
        budget -= max(-found.footprint.headroom_bytes, budget // 200)
    assert found is not None
    plan = None
    if found.footprint.fits:
        taken = levers.describe(job, device, how, found, own, plain_nets(job), keep, drafted)
        plan = _plan(job, name, card, found, own, how, taken, seed)
    return Answer(
        plan=plan,
        chosen=found if plan else None,
        floor=found,
        alternatives=tuple(beside),
        next_step=step if plan else None,
        learning_rate=learning_rate(tuned_for, global_batch),
        seconds=time.perf_counter() - begin,
    )


def _drafted(
    job: Job, how: Tracing, device: Device, global_batch: int, devices: int, fixed: int | None,
    modes: Mapping[str, str] | None,
) -> tuple[Draft, tuple[list[Draft], NextStep | None, dict[str, int]]]:  # fmt: skip
    """The best draft, or the lowest where none fits; the three next best, what more memory would bring, and bytes."""
    first = shape_of(job, min(job.longest or 2, -(-global_batch // devices)))
    with open_fitting(job, how, first) as fitting:
        drafts = Drafts(fitting, device, global_batch, devices, fixed=fixed, modes=modes)
        best = drafts.best()
        if best is None:
            return min(drafts.tried.values(), key=lambda draft: draft.peak), ([], None, {})
        return best, (drafts.beside(best), next_step(drafts, best), levers.traced(drafts) | drafts.around(best))


def _whole(
    job: Job, how: Tracing, device: Device, draft: Draft, own: Mapping[str, str], *, may_choose: bool
) -> tuple[Candidate, Tracing]:
    """A draft traced with its optimizer step, validation and saving, and the room that these then need."""
    count = len(draft.geometry.micro_batches[0])
    shape: Shape = shape_of(job, draft.geometry.micro_batch)
    how = replace(how, micro_batches=count, checkpointing=draft.modes)
    for policy in phase_room.policies(job) if may_choose else [how.validation]:
        how = replace(how, validation=policy)
        footprint = footprint_on(trace_job(job, shape, how), device)
        if footprint.fits or footprint.limiting_phase != "validate" or not draft.fits:
            break
    found = Candidate(
        policy=policy_name(draft.modes, own),
        checkpointing=draft.modes,
        geometry=draft.geometry,
        footprint=footprint,
        seconds=draft.seconds,
    )
    return found, how


def policy_name(modes: Mapping[str, str], own: Mapping[str, str]) -> str:
    """What a choice of modes is called."""
    if not modes:
        return "everything kept"
    if dict(modes) == dict(own):
        return "the job's own checkpointing"
    counts = {mode: list(modes.values()).count(mode) for mode in dict.fromkeys(modes.values())}
    return ", ".join(f"{count} modules {_DONE[mode]}" for mode, count in counts.items())


_DONE = {"full": "recomputed", "selective": "recomputed selectively", "offload": "offloaded", "keep": "kept"}


def _check_keep(keep: Collection[str]) -> None:
    for word in keep:
        if word not in KEEP:
            raise InputError(f"--keep {word}", "no such choice", f"write some of {','.join(KEEP)}")


def _less_host_margin(device: Device) -> Device:
    """On a CPU the budget also holds what is no tensor: Python's objects, autograd's graph, the heap's gaps."""
    if device.is_cuda or device.usable_bytes is None:
        return device
    return replace(
        device, usable_bytes=max(device.usable_bytes - HOST_MARGIN_BYTES - int(device.usable_bytes * HOST_MARGIN), 1)
    )


def _plan(
    job: Job, name: str, device: Device, chosen: Candidate, own: Mapping[str, str], how: Tracing, taken: list[Lever],
    seed: int,
) -> Plan:  # fmt: skip
    geometry, found = chosen.geometry, chosen.footprint
    return Plan(
        job=name,
        settings=job.settings(),
        device=device.key,
        budget_bytes=device.usable_bytes or 0,
        unit=job.unit,
        global_batch=geometry.global_batch,
        micro_batch=geometry.micro_batch,
        micro_batches=[list(rank) for rank in geometry.micro_batches],
        arithmetic=geometry.arithmetic(),
        engine="single" if geometry.data_parallel == 1 else "ddp",
        precision=job.precision,
        seed=seed,
        checkpointing=dict(chosen.checkpointing),
        validation=how.validation,
        saving=how.saving,
        implementation=how.implementation,
        reasons=levers.reasons(chosen, own, device, how),
        levers=taken,
        phases={phase: asdict(value) for phase, value in found.phases.items()},
        step_seconds=chosen.seconds,
    )


__all__ = ["Answer", "Candidate", "checkpoint_all", "find_plan", "policy_name"]


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
            "policy": policy_name(draft.modes, {}),
            "micro_batch": draft.geometry.micro_batch,
            "arithmetic": draft.geometry.arithmetic(),
            "step_seconds": draft.seconds,
            "process_bytes": draft.peak,
            "traced": draft.traced,
        }
        for draft in answer.alternatives
    ]
    found["next_step"] = asdict(answer.next_step) if answer.next_step else None
    found["learning_rate"] = asdict(answer.learning_rate)
    found["seconds"] = answer.seconds
    return found
