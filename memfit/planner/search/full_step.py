"""A draft traced whole: its windows, validation under one policy after another until it fits, and saving."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from memfit.device.hardware.catalogue import Device
from memfit.footprint import Footprint
from memfit.geometry import Geometry
from memfit.job import Shape
from memfit.planner.live_bytes import LiveBytes, live_bytes_of
from memfit.planner.options import validation_policies
from memfit.planner.pipeline.stage_figures import StageFigures
from memfit.planner.prediction import footprint_on, need_on
from memfit.planner.search.candidate_search import Candidate
from memfit.planner.search.validation_choice import OtherPolicies, Validation, validation_of
from memfit.trace.step import Tracing
from memfit.trace.validation_traces import PolicyTraces
from memfit.wording import counted


@dataclass(frozen=True, kw_only=True)
class ReplayedCandidate:
    """One way to run the global batch, replayed."""

    policy: str
    checkpointing: Mapping[str, str]
    geometry: Geometry
    footprint: Footprint
    seconds: float | None
    engine: str = "single"
    allocator: str = "default"
    """expandable_segments where it does not fit without."""
    allocator_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by phase that expandable segments reserve less than default ones; empty on a CPU."""
    communication_seconds: float = 0.0
    """Seconds of communication within ``seconds``, by the card's own link; 0 where the link is not known. On a mesh, of
    data-parallel ranks, what computation does not hide."""
    communication: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a window by collective and dimension of the mesh, hidden or not; empty without a mesh."""
    stages: tuple[StageFigures, ...] = ()
    """Of a pipeline; empty without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FullStep:
    """A candidate, how it was traced, and what other policies for its validation would come to."""

    candidate: ReplayedCandidate
    how: Tracing
    live_bytes: LiveBytes
    tried: tuple[Validation, ...]
    """Policies in the order in which they were tried; the last one is the candidate's."""
    other_policies: Mapping[str, Validation | str]
    """By option that is not applied: the candidate's policy with that option added, or why it is not known."""


def trace_full_step(
    traces: PolicyTraces,
    device: Device,
    candidate: Candidate,
    own: Mapping[str, str],
    *,
    may_choose: bool,
    resized: Shape | None = None,
    second_core: bool = False,
) -> FullStep:
    """A draft traced with its optimizer step, validation and saving, and the room that these then need.

    Args:
        traces: of the job, which is set up; its windows have not run.
        own: the job's own checkpointing.
        may_choose: whether room may be made for validation.
        resized: a micro-batch under which validation is looked at too, where it follows the micro-batch.
        second_core: whether a copy of this process may trace a part.
    """
    job, how = traces.job, traces.how
    count, shape = len(candidate.geometry.micro_batches[0]), how.shape_of(job, candidate.geometry.micro_batch)
    how = replace(how, micro_batches=count, checkpointing=candidate.modes)
    sizes = how.mesh.sizes() if how.mesh is not None else {}
    policies = list(validation_policies.validation_policies(job)) if may_choose else [how.validation]
    tried: list[Validation] = []
    traces.run_windows(shape, how)
    with closing(
        OtherPolicies(job, traces, device, second_core=second_core and not traces.are_alone)
    ) as other_policies:
        first = policies[0]
        for policy in policies:
            others = validation_policies.other_policies(job, policy, shape.items, resized) if policy is first else {}
            validation_trace = other_policies.trace(policy, others) if others else traces.trace(policy)
            how = replace(how, validation=policy)
            plain = footprint = footprint_on(validation_trace.trace, device, how.world, mesh=sizes)
            if not plain.fits and device.is_cuda:
                other = footprint_on(validation_trace.trace, device, how.world, "expandable_segments", mesh=sizes)
                if other.fits or plain.limiting_phase == "train" != other.limiting_phase:
                    footprint = other
            live_bytes = live_bytes_of(validation_trace.trace, device)
            tried.append(validation_of(validation_trace, live_bytes, device, job.precision))
            if footprint.fits or footprint.limiting_phase != "validate":
                break
        others = validation_policies.other_policies(job, how.validation, shape.items, resized) if footprint.fits else {}
        outcomes = other_policies.outcomes(others, validation_trace.operators)
    expandable = need_on(validation_trace.trace, device, how.world, "expandable_segments", mesh=sizes).process_bytes
    replayed = ReplayedCandidate(
        policy=policy_name(candidate.modes, own),
        checkpointing=candidate.modes,
        geometry=candidate.geometry,
        footprint=footprint,
        seconds=candidate.seconds,
        engine=how.engine,
        allocator="default" if footprint is plain else "expandable_segments",
        allocator_bytes={
            name: phase.process_bytes - expandable[name] for name, phase in plain.phases.items() if device.is_cuda
        },
    )
    return FullStep(candidate=replayed, how=how, live_bytes=live_bytes, tried=tuple(tried), other_policies=outcomes)


def policy_name(modes: Mapping[str, str], own: Mapping[str, str]) -> str:
    """What a choice of modes is called."""
    if not modes:
        return "everything kept"
    if dict(modes) == dict(own):
        return "the job's own checkpointing"
    counts = {mode: list(modes.values()).count(mode) for mode in dict.fromkeys(modes.values())}
    return ", ".join(f"{counted(count, 'module')} {_DONE[mode]}" for mode, count in counts.items())


_DONE = {"full": "recomputed", "selective": "recomputed selectively", "offload": "offloaded", "keep": "kept"}
