"""One engine's answer: the best candidate under it, traced in full until its windows fit, and the plan made of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial

from memfit.apply.host_state import host_bytes
from memfit.apply.train_state import make_optimizers, multiply_rates
from memfit.device.hardware.catalogue import Device
from memfit.engine.capabilities import dimensions
from memfit.job import Job, Nets, Shape
from memfit.plan import MemoryOption, PhasePolicy, Plan
from memfit.planner.checkpoint_writing import choose_writing
from memfit.planner.cpu_margin import without_cpu_margin
from memfit.planner.lr_scaling import Rate, learning_rate
from memfit.planner.mesh_nets import rank_nets
from memfit.planner.mesh_search.mesh_row import MeshRow
from memfit.planner.options import options
from memfit.planner.options.offload_options import CPU_OFFLOAD
from memfit.planner.options.option_context import OptionContext
from memfit.planner.options.option_traces import OptionTraces, other_geometry, trace_options
from memfit.planner.predict import (
    BINDING_RANK,
    default_checkpointing,
    last_of_sequence,
    nets_and_readings,
)
from memfit.planner.read_ahead import copy_ahead, read_ahead
from memfit.planner.request import PlanRequest
from memfit.planner.search.candidate_search import Candidate, CandidateSearch
from memfit.planner.search.engine_choice import Communicates, communication_model
from memfit.planner.search.full_step import FullStep, ReplayedCandidate, trace_full_step
from memfit.planner.search.plan_reasons import (
    communication_reason,
    host_reason,
    requested_reasons,
    stage_reason,
    with_refusal,
)
from memfit.planner.search.second_core import CopiedFullStep, CopiedJob, SecondCore, open_second_core
from memfit.planner.search.traced_job import TracedJob, open_traced_job
from memfit.planner.suggestions.larger_memory import LargerMemory, next_step
from memfit.planner.suggestions.smaller_settings import SmallerSetting
from memfit.planner.timing.collective_time import seconds_by_collective
from memfit.planner.timing.mesh_time import MeshCommunication
from memfit.planner.timing.time_error import with_time_error
from memfit.planner.variable_length.length_check import EXPANDABLE, LengthCheck, check_lengths
from memfit.trace.step import Tracing
from memfit.trace.validation_traces import PolicyTraces, open_policy_traces
from memfit.work_stages import begin_stage

ROUNDS = 3
"""Full traces over the budget before the search gives up."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan, or None where nothing fits; then ``floor`` is the smallest need that the search reached."""

    plan: Plan | None
    chosen: ReplayedCandidate | None
    floor: ReplayedCandidate
    alternatives: tuple[Candidate, ...]
    next_step: LargerMemory | None = None
    lengths: LengthCheck | None = None
    """The first windows one after the other, where lengths vary."""
    smaller_settings: tuple[SmallerSetting, ...] = ()
    """Settings of the job that would make it smaller, where nothing fits."""
    larger_hardware: tuple[str, ...] = ()
    """Other hardware or choices with which it would fit, in words, where nothing fits."""
    how: Tracing | None = None
    """How the smallest need was traced, where nothing fits."""
    learning_rate: Rate = field(default_factory=lambda: learning_rate(None, 1))
    nets: Nets | None = None
    """The job's nets without their bytes, as the search built them."""
    meshes: tuple[MeshRow, ...] = ()
    """Every mesh that was looked at, the best first, where the search chose it."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best candidate, or the smallest where none fits, and what was traced around it."""

    best: Candidate
    alternatives: list[Candidate] = field(default_factory=list)
    next_step: LargerMemory | None = None
    traces: OptionTraces = field(default_factory=OptionTraces)
    net_kind: str = ""
    probed: bool = False
    refuses_single: str = ""
    """What the nets raise at a micro-batch of one item."""
    communication: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a window by collective and dimension of the mesh."""
    host_bytes: int = 0
    """Of a rank's state, see ``memfit.apply.host_state``."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The best candidate traced in full: its footprint, and its first windows where lengths vary."""

    result: SearchResult
    full_step: FullStep
    candidate: ReplayedCandidate
    lengths: LengthCheck | None

    @property
    def fits(self) -> bool:
        return self.candidate.footprint.fits and (self.lengths is None or self.lengths.fits)


class EngineSearch:
    """The steps from a request to an answer: search, trace in full, check lengths, describe the options, plan.

    Args:
        optimizer_state, average: where optimizer state and the weights' average are kept.
        parts: host: where an engine that shards keeps a rank's parts, whatever the request says.
    """

    def __init__(
        self, job: Job, request: PlanRequest, engine: str, *, optimizer_state: str = "device", average: str = "device",
        parts: str = "device",
    ) -> None:  # fmt: skip
        self.job, self.asked = job, request
        if parts == "host":
            request = replace(request, engine_choices={**request.engine_choices, CPU_OFFLOAD: True})
        self.request = request
        self.device = without_cpu_margin(request.device)
        self.nets, self.by_precision = nets_and_readings(job, "precision")
        self.own = default_checkpointing(job, self.nets)
        keeps_optimizer = "optimizer" in request.keep
        self.how = Tracing(
            device=self.device,
            implementation="job" if keeps_optimizer else options.implementation(job, self.nets, self.device),
            validation=PhasePolicy(), saving=PhasePolicy(), engine=engine, world=request.world,
            mesh=dimensions(engine, request.mesh), optimizer_state=optimizer_state, average=average,
            engine_choices=request.engine_choices,
            rank=last_of_sequence(request.mesh) if request.mesh is not None else BINDING_RANK,
        )  # fmt: skip
        self.links = request.links
        self.communication_seconds = self._communicates(engine)

    def _communicates(self, engine: str) -> Communicates:
        mesh = self.request.mesh
        if mesh is None or self.links is None:
            return communication_model(engine, self.nets, self.device, self.request.devices, mesh)
        traffic = rank_nets(self.job, mesh, self.nets).traffic(engine)
        return MeshCommunication(engine=engine, traffic=traffic, links=self.links)

    @cached_property
    def rate(self) -> Rate:
        request = self.request
        rate = learning_rate(request.tuned_for, request.global_batch, request.learning_rate_rule)
        if rate.factor != 1.0:
            multiply_rates(make_optimizers(self.job, self.nets), rate.factor)  # refused here rather than by a run
        return rate

    def answer(self) -> Answer:
        rate = self.rate
        outcome = self._outcome()
        candidate, result = outcome.candidate, outcome.result
        if not outcome.fits:
            return Answer(
                plan=None, chosen=None, floor=candidate, alternatives=tuple(result.alternatives), learning_rate=rate,
                lengths=outcome.lengths, how=replace(outcome.full_step.how, engine_choices=self.request.engine_choices),
            )  # fmt: skip
        writing, ahead = choose_writing(candidate.footprint, self.device), read_ahead(candidate.footprint)
        copies = copy_ahead(candidate.footprint, self.device)
        candidate = replace(candidate, footprint=writing.footprint)
        plan = with_time_error(self._plan(outcome), result.net_kind, self.device, result.probed)
        if outcome.lengths is not None:
            plan = _with_lengths(plan, outcome.lengths, outcome.candidate.allocator)
        plan = replace(
            plan,
            net_kind=result.net_kind,
            checkpoint_writing=writing.how,
            read_ahead_bytes=ahead.nbytes,
            copy_ahead_bytes=copies.nbytes or 0,
            state_on_host_bytes=result.host_bytes,
            reasons={
                **plan.reasons,
                "checkpoint_writing": writing.reason,
                **({"read_ahead_bytes": ahead.reason} if ahead.nbytes else {}),
                **({"copy_ahead_bytes": copies.reason} if copies.reason else {}),
            },
            phases={phase: asdict(footprint) for phase, footprint in candidate.footprint.phases.items()},
        )
        return Answer(
            plan=plan, chosen=candidate, floor=candidate, alternatives=tuple(result.alternatives),
            next_step=result.next_step, learning_rate=rate, lengths=outcome.lengths, nets=self.nets,
        )  # fmt: skip

    def _outcome(self) -> Outcome:
        """The best candidate that also fits when it is traced in full; each round searches under a smaller budget."""
        budget = self.device.usable_bytes or 0
        with (
            open_traced_job(self.job, self.how, self._first_shape(), self.links) as traced_job,
            self._second_core(traced_job) as traced_job.second_core,
        ):
            for _ in range(ROUNDS):
                result = self._search(traced_job, replace(self.device, usable_bytes=budget))
                traced_job.pause()
                outcome = self._traced_in_full(result, traced_job.second_core)
                footprint = outcome.candidate.footprint
                if outcome.fits:
                    break
                if footprint.fits:
                    budget -= budget // 20
                elif not result.best.fits or footprint.limiting_phase != "train":
                    break
                else:
                    budget -= max(-footprint.headroom_bytes, budget // 200)
        return outcome

    def _first_shape(self) -> Shape:
        share = -(-self.request.global_batch // self.request.devices)
        return self.how.shape_of(self.job, min(self.job.longest or 2, share))

    def _second_core(self, traced_job: TracedJob) -> AbstractContextManager[SecondCore | None]:
        """One rank of a card can be traced by copies of this process."""
        if not self.device.is_cuda:
            return nullcontext()
        copied_step = CopiedFullStep(
            traced_job.pause, partial(open_policy_traces, self.job, self.how),
            partial(self._full_step_behind, second_core=True),
        )  # fmt: skip
        return open_second_core(CopiedJob(traced_job=traced_job), copied_step)

    def _search(self, traced_job: TracedJob, device: Device) -> SearchResult:
        request = self.request
        begin_stage(f"trying micro-batches under {self.how.engine}")
        search = CandidateSearch(
            traced_job, device, request.global_batch, request.devices, mesh=self.how.mesh,
            fixed=request.micro_batch, modes=self.own if "checkpointing" in request.keep else None,
            communicates=self.communication_seconds,
        )  # fmt: skip
        return self._best_of(traced_job, search)

    def _best_of(self, traced_job: TracedJob, search: CandidateSearch) -> SearchResult:
        """The best candidate of a search, with what was traced around it."""
        best = search.best()
        if best is None:
            return SearchResult(best=min(search.tried.values(), key=lambda candidate: candidate.peak))
        if traced_job.second_core is not None:
            geometry = other_geometry(search, best)
            resized = self.how.shape_of(self.job, geometry.micro_batch) if geometry else None
            traced_job.second_core.begin_full_step(best, resized)
        begin_stage("tracing what other options would save")
        return SearchResult(
            best=best, alternatives=search.alternatives(best), next_step=next_step(search, best),
            traces=trace_options(search, best, self.nets, by_precision=self.by_precision),
            net_kind=traced_job.net_kind, probed=search.probed is not None, refuses_single=search.refuses_single,
            communication=self._communication(traced_job, search, best),
            host_bytes=host_bytes(traced_job.session.train_state),
        )  # fmt: skip

    def _traced_in_full(self, result: SearchResult, second_core: SecondCore | None = None) -> Outcome:
        begin_stage(f"tracing all of {result.best.geometry.arithmetic()}, with validation and saving")
        full_step = second_core.full_step(result.best) if second_core is not None else None
        if full_step is None:
            full_step = self._full_step(result)
        candidate = replace(
            full_step.candidate, communication_seconds=self._waited(result.best), communication=result.communication
        )
        lengths = None
        if candidate.footprint.fits:
            begin_stage("replaying its first windows, where lengths vary")
            lengths = check_lengths(self.job, self.how, candidate.geometry, candidate.checkpointing, self.request.seed)
        return Outcome(result=result, full_step=full_step, candidate=candidate, lengths=lengths)

    def _communication(self, traced_job: TracedJob, search: CandidateSearch, best: Candidate) -> dict[str, float]:
        """Seconds of a window by collective and dimension, those of data parallelism and those inside of nets."""
        if self.links is None or not isinstance(self.communication_seconds, MeshCommunication):
            return {}
        (shape, accumulated), rank = search.shape(best.geometry), best.geometry.micro_batches[0]
        traced = traced_job.trace(shape, best.modes, accumulated=accumulated)
        inside = seconds_by_collective(traced.trace, self.links)
        times = sum(rank) / best.geometry.micro_batch
        stages = search.pipeline.sent_seconds(len(rank), search.sent_bytes(best.geometry))
        return (
            self.communication_seconds.window_seconds(len(rank))
            | {name: each * times for name, each in inside.items()}
            | ({"send over pp": stages} if stages else {})
        )

    def _waited(self, candidate: Candidate) -> float:
        """Seconds of a window that data-parallel communication adds to its computation."""
        rank = candidate.geometry.micro_batches[0]
        computed = candidate.micro_seconds * sum(rank) / candidate.geometry.micro_batch
        return self.communication_seconds(len(rank), computed)

    def _full_step(self, result: SearchResult) -> FullStep:
        """The full step of the rank that needs most."""
        return self._full_step_of(self.how, result)

    def _full_step_of(self, how: Tracing, result: SearchResult, *, may_choose: bool = True) -> FullStep:
        """The full step of one rank; ``may_choose``: room may be made for its validation."""
        with open_policy_traces(self.job, how) as traces:
            return self._full_step_behind(traces, result.best, result.traces.resized, may_choose=may_choose)

    def _full_step_behind(
        self,
        traces: PolicyTraces,
        best: Candidate,
        resized: Shape | None,
        *,
        may_choose: bool = True,
        second_core: bool = False,
    ) -> FullStep:
        """The full step of a rank whose job is set up."""
        may_choose = may_choose and "validation" not in self.request.keep
        return trace_full_step(
            traces, self.device, best, self.own, may_choose=may_choose, resized=resized, second_core=second_core
        )

    def _plan(self, outcome: Outcome) -> Plan:
        request, how, candidate = self.request, outcome.full_step.how, outcome.candidate
        geometry = candidate.geometry
        return Plan(
            job=request.name,
            settings=self.job.settings(),
            device=request.device.key,
            budget_bytes=request.device.usable_bytes or 0,
            unit=self.job.unit,
            global_batch=geometry.global_batch,
            micro_batch=geometry.micro_batch,
            micro_batches=[list(rank) for rank in geometry.micro_batches],
            arithmetic=geometry.arithmetic(),
            engine=how.engine,
            mesh=how.mesh.sizes() if how.mesh is not None else {},
            engine_choices=dict(how.engine_choices),
            precision=self.job.precision,
            seed=request.seed,
            checkpointing=dict(candidate.checkpointing),
            validation=how.validation,
            saving=how.saving,
            implementation=how.implementation,
            allocator=candidate.allocator,
            optimizer_state=how.optimizer_state,
            average=how.average,
            learning_rate=self.rate.factor,
            warmup_windows=self.rate.warmup_windows,
            reasons=with_refusal(
                options.reasons(candidate, self.own, self.device, how)
                | requested_reasons(request, self.asked.engine_choices)
                | communication_reason(candidate)
                | stage_reason(candidate.stages)
                | host_reason(outcome.result.host_bytes, how),
                outcome.result.refuses_single,
            ),
            options=self._memory_options(outcome),
            stages=[asdict(stage) for stage in candidate.stages],
            step_seconds=candidate.seconds,
        )

    def _memory_options(self, outcome: Outcome) -> list[MemoryOption]:
        return options.memory_options(
            OptionContext(
                job=self.job, device=self.device, nets=self.nets, own=self.own, keep=self.request.keep,
                full_step=outcome.full_step, traces=outcome.result.traces,
            )
        )  # fmt: skip


def _with_lengths(plan: Plan, lengths: LengthCheck, allocator: str) -> Plan:
    """The plan with the allocator that its varied lengths need."""
    return replace(
        plan,
        allocator=lengths.allocator if allocator == "default" else allocator,
        options=[*(option for option in plan.options if option.name != EXPANDABLE), *lengths.options()],
        reasons={**plan.reasons, "varied lengths": lengths.reason()},
    )
