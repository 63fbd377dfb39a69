"""The answer of a mesh with stages of a pipeline: cut, micro-batch and recomputing are proposed together by the stages'
model, and the ranks that may need most are traced in full, until a proposal fits and none is noticeably faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.device.hardware.catalogue import Device
from memfit.engine.pipeline_cut import schedule_of
from memfit.engine.stage_bounds import FIRST_MODULES
from memfit.planner.pipeline.cut_search import CutSearch, ProposedCut
from memfit.planner.pipeline.pipeline_costs import PipelineCosts
from memfit.planner.pipeline.stage_figures import with_bytes
from memfit.planner.predict import binding_ranks, checkpoint_all, last_of_sequence
from memfit.planner.search.batch_splits import geometries
from memfit.planner.search.candidate_search import Candidate, CandidateSearch
from memfit.planner.search.engine_search import EngineSearch, Outcome, SearchResult
from memfit.planner.search.full_step import FullStep
from memfit.planner.search.traced_job import TracedJob, open_traced_job
from memfit.planner.timing.pipeline_time import PipelineTime
from memfit.work_stages import begin_stage

CUTS = 6
"""Proposals that are planned, at most."""
OVER = 1.01
"""Of the budget, what a stage needs at least that does not fit: by how much it exceeds it in truth is not known, since
an allocator gives memory back before it fails."""
ALTERNATIVES = 3


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A proposal that was traced in full."""

    cut: ProposedCut
    outcome: Outcome


class PipelineSearch(EngineSearch):
    """The steps of ``EngineSearch`` where nets are cut into stages."""

    def _outcome(self) -> Outcome:
        cuts = self._cuts()
        best: _Tried | None = None
        for left in reversed(range(CUTS)):
            fits = best is not None and best.outcome.fits
            enough = best.cut.seconds if best is not None and fits else None
            proposed = cuts.next(enough, smallest=not left and not fits)
            if proposed is None:
                break
            tried = _Tried(cut=proposed, outcome=self._planned(cuts, proposed))
            if best is None or _is_better(tried.outcome, best.outcome):
                best = tried
        assert best is not None
        return self._with_alternatives(cuts, best)

    def _cuts(self) -> CutSearch:
        """The cuts for every way to divide the window."""
        request, mesh = self.request, self.how.mesh
        assert mesh is not None
        begin_stage("tracing what each module of the pipeline takes")
        costs = PipelineCosts(self.job, self.nets, self.how, self._first_shape())
        modes = [self.own] if "checkpointing" in request.keep else [self.own, checkpoint_all(self.job, self.nets)]
        each = self.how.world // request.devices
        split = geometries(self.job, request.global_batch, request.devices, each, request.micro_batch)
        split, self._refuses_single = costs.without_single_items(split, self.own)
        return CutSearch(costs, mesh, self.device, split, modes, self.links, schedule=self._schedule)

    @property
    def _schedule(self) -> str:
        return schedule_of(self.request.engine_choices)

    def _planned(self, cuts: CutSearch, cut: ProposedCut) -> Outcome:
        """A proposal, traced in full; the cuts learn what its stages need."""
        self._cut = cut
        assert self.how.mesh is not None
        slowest = cut.slowest * (self.how.world // self.how.stages) + last_of_sequence(self.how.mesh)
        choices = {**self.request.engine_choices, FIRST_MODULES: cut.first_modules}
        self.how = replace(self.how, rank=slowest, engine_choices=choices)
        with open_traced_job(self.job, self.how, self._first_shape(), self.links) as traced_job:
            result = replace(self._search(traced_job, self.device), refuses_single=self._refuses_single)
        outcome = self._traced_in_full(result)
        beyond = int(cuts.budget * OVER) if outcome.candidate.footprint.fits and not outcome.fits else 0
        cuts.learn(cut, {stage: max(need, beyond) for stage, need in self._needs.items()})
        stages = with_bytes(cut.figures, self.how.stages, self._process_bytes)
        return replace(outcome, candidate=replace(outcome.candidate, stages=stages))

    def _search(self, traced_job: TracedJob, device: Device) -> SearchResult:
        window, request = self._cut.window, self.request
        begin_stage(f"trying {window.geometry.arithmetic()} on stages from {', '.join(self._cut.first_modules)}")
        link = (self.links or {}).get("pp")
        search = CandidateSearch(
            traced_job, device, request.global_batch, request.devices, mesh=self.how.mesh,
            fixed=window.geometry.micro_batch, modes=window.modes, communicates=self.communication_seconds,
            pipeline=PipelineTime(
                stages=self.how.stages, link=link, shares=self._cut.shares, schedule=self._schedule
            ),
        )  # fmt: skip
        return self._best_of(traced_job, search)

    def _full_step(self, result: SearchResult) -> FullStep:
        """The full step of the rank that needs most. All stages have the first one's validation."""
        how, best = self.how, None
        each = how.world // how.stages
        self._needs: dict[int, int] = {}
        self._process_bytes: dict[int, int] = {}
        for rank in binding_ranks(self.job, self.nets, how.engine, how.world, how.mesh, how.engine_choices):
            full_step = self._full_step_of(replace(how, rank=rank), result, may_choose=best is None)
            how = replace(how, validation=full_step.how.validation)
            stage = rank // each
            self._needs[stage] = max(_need(full_step, self.device), self._needs.get(stage, 0))
            self._process_bytes[stage] = max(_most(full_step), self._process_bytes.get(stage, 0))
            if best is None or _most(full_step) > _most(best):
                best = full_step
        assert best is not None
        return best

    def _with_alternatives(self, cuts: CutSearch, best: _Tried) -> Outcome:
        """The outcome with other micro-batches that fit by the model, timed by their difference to the best one."""
        outcome, chosen = best.outcome, best.outcome.result.best

        def candidate(cut: ProposedCut) -> Candidate:
            more = cut.seconds - best.cut.seconds
            return Candidate(
                geometry=cut.window.geometry, modes=cut.window.modes, rank=chosen.rank + more, peak=cut.peak, fits=True,
                seconds=None if chosen.seconds is None else chosen.seconds + more, traced=False,
                micro_seconds=max(cut.rank_seconds),
            )  # fmt: skip

        if not outcome.fits:
            return outcome
        alternatives = [candidate(cut) for cut in cuts.others(best.cut, ALTERNATIVES)]
        return replace(outcome, result=replace(outcome.result, alternatives=alternatives))


def _is_better(outcome: Outcome, best: Outcome) -> bool:
    """Whether an outcome fits in less time, or exceeds the memory less where none fits."""
    if outcome.fits and best.fits:
        return outcome.result.best.rank < best.result.best.rank
    headroom = outcome.candidate.footprint.headroom_bytes
    return outcome.fits or (not best.fits and headroom > best.candidate.footprint.headroom_bytes)


def _need(full_step: FullStep, device: Device) -> int:
    """Bytes that a rank needs at least: its tensors and what lies outside; of one that does not fit, more than there
    are."""
    footprint = full_step.candidate.footprint
    phase = footprint.phases["train"]
    nbytes = phase.allocated_bytes + phase.process_bytes - phase.reserved_bytes
    fits = footprint.fits or footprint.limiting_phase != "train"
    return nbytes if fits else max(nbytes, int((device.usable_bytes or 0) * OVER))


def _most(full_step: FullStep) -> int:
    return max(phase.process_bytes for phase in full_step.candidate.footprint.phases.values())
