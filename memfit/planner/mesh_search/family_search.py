"""The meshes of one family, estimated from traces of one of them.

Ranks that cut nets alike run the same operators on the same shapes. What differs is how much of parameters, gradients
and optimizer state each holds, which is in proportion to 1 / (dp_shard x cp), and what they tell each other. So one
session is traced, on the mesh that shards over most ranks, and every other mesh is searched under a budget that is
smaller by the state that it holds more. A mesh that shards less has less memory for activations: it computes as long,
or longer.

Left out: padding, where a tensor does not divide by its shards, that a first backward has not all gradients yet, and
of a pipeline the micro-batches that are on their way beside the one that was traced.
What is chosen is traced on its own mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memfit.device.hardware.catalogue import Device, nccl_bytes
from memfit.device.hardware.cluster import GroupLink
from memfit.engine.capabilities import CAPABILITIES, dimensions
from memfit.engine.stage_bounds import FIRST_MODULES
from memfit.job import Job
from memfit.mesh import MeshShape, communicators
from memfit.plan import PhasePolicy
from memfit.planner.mesh_nets import RankNets
from memfit.planner.mesh_search.mesh_row import FITS, SLOWER, TOO_LARGE, MeshRow
from memfit.planner.mesh_search.mesh_shapes import MeshFamily
from memfit.planner.options import options
from memfit.planner.pipeline.cut_search import CutSearch
from memfit.planner.pipeline.pipeline_costs import PipelineCosts
from memfit.planner.predict import checkpoint_all, default_checkpointing, last_of_sequence
from memfit.planner.request import PlanRequest
from memfit.planner.search.batch_splits import geometries
from memfit.planner.search.candidate_search import Candidate, CandidateSearch
from memfit.planner.search.full_step import policy_name
from memfit.planner.search.traced_job import TracedJob, open_traced_job
from memfit.planner.timing.mesh_time import MeshCommunication
from memfit.planner.timing.pipeline_time import ONE_STAGE, PipelineTime
from memfit.torch_compat.attributes import local_tensor
from memfit.trace.step import Tracing

ON_ITS_WAY = "as estimated with one micro-batch on its way, of which a stage holds several"
"""What is left out of the memory of a pipeline that was not traced in full."""


class FamilySearch:
    """One family of meshes for a job and a request, of which ``devices`` are all ranks."""

    def __init__(self, job: Job, request: PlanRequest, family: MeshFamily, nets: RankNets, whole: Any,
                 costs: PipelineCosts) -> None:  # fmt: skip
        """``nets``: of a rank before data parallelism; ``whole``: the job's own nets, without their bytes; ``costs``:
        of their modules, where they are cut into stages."""
        self.job, self.request, self.family, self.nets = job, request, family, nets
        self.device, self.own = request.device, default_checkpointing(job, whole)
        self.everything = checkpoint_all(job, whole) if family.cut.pp > 1 else {}
        base = family.meshes[0]
        keeps = "optimizer" in request.keep
        self.how = Tracing(
            device=self.device, implementation="job" if keeps else options.implementation(job, whole, self.device),
            validation=PhasePolicy(), saving=PhasePolicy(), engine=family.engine, world=base.world,
            mesh=dimensions(family.engine, base), rank=last_of_sequence(base),
        )  # fmt: skip
        self.pipeline = ONE_STAGE
        if base.pp > 1:
            self._take_cut(base, whole, costs)
        self.state_per_byte = 0.0
        """Bytes of optimizer state for each byte of trained parameters; 0 until it was traced."""

    def _take_cut(self, mesh: MeshShape, whole: Any, costs: PipelineCosts) -> None:
        """Traces and times the slowest stage of the first cut that a plan would try."""
        request = self.request
        split = geometries(
            self.job, request.global_batch, mesh.data_ranks, mesh.world // mesh.data_ranks, request.micro_batch
        )
        split, _ = costs.without_single_items(split, self.own)
        modes = [self.own] if "checkpointing" in request.keep else [self.own, self.everything]
        links = self._links(mesh)
        cut = CutSearch(costs, mesh, self.device, split, modes, links).next()
        assert cut is not None
        slowest = cut.slowest * (mesh.world // mesh.pp) + last_of_sequence(mesh)
        self.how = replace(self.how, rank=slowest, engine_choices={FIRST_MODULES: cut.first_modules})
        self.pipeline = PipelineTime(stages=mesh.pp, link=(links or {}).get("pp"), shares=cut.shares)

    def least_bytes(self, mesh: MeshShape, state_per_byte: float) -> int:
        """Process bytes that a rank holds at the end of a window at least: its state, and what lies outside."""
        outside = (self.device.context_low or 0) + nccl_bytes(self.device)[0] * communicators(mesh.world, mesh.sizes())
        return outside + self.nets.frozen_bytes + int(self._sharded(mesh) * (2 + state_per_byte))

    def rows(self, state_per_byte: float, enough: float) -> Iterator[MeshRow]:
        """A row for each mesh of the family.

        Args:
            state_per_byte: of optimizer state, from another family; 0 where none was traced.
            enough: seconds of the best plan so far: what takes as long at least is not looked at.
        """
        self.state_per_byte = state_per_byte
        possible = [mesh for mesh in self.family.meshes if self._may_fit(mesh)]
        yield from (self._too_large(mesh) for mesh in self.family.meshes if mesh not in possible)
        if not possible:
            return
        first = self.how.shape_of(self.job, min(self.job.longest or 2, self._share))
        with open_traced_job(self.job, self.how, first, self._links(self.family.meshes[0])) as traced_job:
            self.state_per_byte = self._traced_state(traced_job)
            least = self._least_seconds(traced_job)
            for mesh in possible:
                bound = least + self._communication(mesh)(1, least)
                if not self._may_fit(mesh):
                    yield self._too_large(mesh)
                elif bound >= enough:
                    yield self._row(mesh, SLOWER, seconds=bound)
                else:
                    row, computed = self._searched(traced_job, mesh)
                    if row.state == FITS:
                        enough, least = min(enough, row.seconds or enough), max(least, computed)
                    yield row

    @property
    def _share(self) -> int:
        return -(-self.request.global_batch // self.family.data_ranks)

    def _may_fit(self, mesh: MeshShape) -> bool:
        return self.least_bytes(mesh, self.state_per_byte) <= (self.device.usable_bytes or 0)

    def _sharded(self, mesh: MeshShape) -> float:
        """Bytes of the trained parameters that one rank keeps."""
        return self.nets.trained_bytes / (mesh.shards if CAPABILITIES[self.family.engine].shards_weights else 1)

    def _held(self, mesh: MeshShape) -> float:
        """Bytes of parameters, gradients and optimizer state that a rank holds while it computes: a stage's parameters
        and gradients are whole, beside its parts of them."""
        if mesh.pp == 1 or mesh.shards == 1:
            return self._sharded(mesh) * (2 + self.state_per_byte)
        return self.nets.trained_bytes * 2 + self._sharded(mesh) * (1 + self.state_per_byte)

    def _links(self, mesh: MeshShape) -> Mapping[str, GroupLink] | None:
        return replace(self.request, mesh=mesh, devices=mesh.data_ranks).links

    def _communication(self, mesh: MeshShape) -> MeshCommunication:
        links = self._links(mesh)
        assert links is not None
        return MeshCommunication(engine=self.family.engine, traffic=self.nets.traffic(self.family.engine), links=links)

    def _traced_state(self, traced_job: TracedJob) -> float:
        train_state = traced_job.session.train_state
        trained = sum(local_tensor(p).nbytes for some in train_state.stepped.values() for p in some)
        state = sum(
            local_tensor(value).nbytes
            for optimizer in train_state.optimizers.values()
            for held in optimizer.state.values()
            for value in held.values()
            if hasattr(value, "nbytes")
        )
        return float(state / max(trained, 1))

    def _least_seconds(self, traced_job: TracedJob) -> float:
        """Seconds of a window that recomputes nothing and waits for no other replica or shard: its share at once."""
        kept = traced_job.kept(self.how.shape_of(self.job, self._share), accumulated=False)
        return traced_job.total_seconds(kept) + traced_job.step_seconds()

    def _searched(self, traced_job: TracedJob, mesh: MeshShape) -> tuple[MeshRow, float]:
        """The row of a mesh's best candidate, and the seconds that it computes."""
        more = int(self._held(mesh) - self._held(self.family.meshes[0]))
        device = self._less(more)
        modes: list[Mapping[str, str] | None] = [self.own if "checkpointing" in self.request.keep else None]
        if mesh.pp > 1 and modes[0] is None:
            modes = [self.own, self.everything]
        for some in modes:
            search = CandidateSearch(
                traced_job, device, self.request.global_batch, mesh.data_ranks,
                mesh=dimensions(self.family.engine, mesh), fixed=self.request.micro_batch, modes=some,
                communicates=self._communication(mesh),
                pipeline=self.pipeline,
            )  # fmt: skip
            best = search.best()
            if best is not None:
                break
        if best is None:
            smallest = min(search.tried.values(), key=lambda candidate: candidate.peak)
            return self._row(mesh, TOO_LARGE, candidate=smallest, more=more), 0.0
        waits = self._communication(mesh)(len(best.geometry.micro_batches[0]), self._computed(best))
        return self._row(
            mesh, FITS, candidate=best, more=more, remark=ON_ITS_WAY if mesh.pp > 1 else ""
        ), best.rank - waits

    def _computed(self, candidate: Candidate) -> float:
        return candidate.micro_seconds * sum(candidate.geometry.micro_batches[0]) / candidate.geometry.micro_batch

    def _less(self, nbytes: int) -> Device:
        return replace(self.device, usable_bytes=max((self.device.usable_bytes or 0) - nbytes, 1))

    def _too_large(self, mesh: MeshShape) -> MeshRow:
        return self._row(mesh, TOO_LARGE, peak=self.least_bytes(mesh, self.state_per_byte), remark="state alone")

    def _row(
        self, mesh: MeshShape, state: str, *, candidate: Candidate | None = None, more: int = 0,
        seconds: float | None = None, peak: int | None = None, remark: str = "",
    ) -> MeshRow:  # fmt: skip
        row = MeshRow(mesh=mesh, engine=self.family.engine, state=state, seconds=seconds, peak=peak, remark=remark)
        if candidate is None:
            return row
        return replace(
            row, seconds=candidate.seconds, peak=candidate.peak + more, arithmetic=candidate.geometry.arithmetic(),
            policy=policy_name(candidate.modes, self.own),
        )  # fmt: skip
