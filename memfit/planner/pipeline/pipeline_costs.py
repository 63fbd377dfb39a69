"""PipelineCosts: the modules of a job's pipeline and what they cost, traced on one device when it is asked for.

Where layers are cut (``tp``), or experts (``ep``) or sequences (``cp``) divided, the trace is that of one of the ranks
that hold parts of them, with the time in which they wait for each other. Ranks of ``cp`` hold parts of the parameters
too, which this trace gathers in every micro-batch, and a stage once in a window: the copies of a gather are counted
here, its collective is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.blocks import find_module
from memfit.device.hardware.cluster import GroupLink
from memfit.engine.pipeline_cut import pipeline_modules
from memfit.engine.stage_bounds import may_be_stage
from memfit.geometry import Geometry
from memfit.job import Job, Nets, Shape
from memfit.mesh import MeshShape, joined_name
from memfit.planner.mesh_nets import without_data_ranks
from memfit.planner.pipeline.module_costs import ModuleCosts, trace_module_costs
from memfit.planner.pipeline.stage_model import StageModel
from memfit.planner.predict import last_of_sequence
from memfit.planner.search.batch_splits import without_single_items
from memfit.planner.search.traced_job import TracedJob
from memfit.trace.step import Tracing


class PipelineCosts:
    """Costs of micro-batches on the device of a trace.

    Args:
        nets: the job's, whole, without their bytes.
        how: of any rank; the costs are those of one device, or of one rank of ``tp``, ``ep`` and ``cp``.
        first: the micro-batch with which the job is set up.
        timed: as of ``trace_module_costs``.
    """

    def __init__(self, job: Job, nets: Nets, how: Tracing, first: Shape, *, timed: bool = True) -> None:
        self._how, self._first = replace(how, rank=0, mesh=None, engine_choices={}), first
        self._job, self._nets, self._timed = job, nets, timed
        self._traced_jobs: dict[tuple[MeshShape, tuple[tuple[str, GroupLink], ...]], TracedJob] = {}
        self._known: dict[Any, ModuleCosts] = {}

    def _traced_job(self, cut: MeshShape, links: Mapping[str, GroupLink]) -> TracedJob:
        """The job whole on a rank of those that hold parts of a layer or of a sequence, or some of the experts.

        Args:
            links: what joins the ranks of these dimensions; empty: what they tell each other takes no time.
        """
        key = (cut, tuple(links.items()))
        if key not in self._traced_jobs:
            mesh = cut if cut.world > 1 else None
            how = replace(
                self._how, engine="single" if mesh is None else "fsdp2", world=cut.world, mesh=mesh,
                rank=last_of_sequence(cut),
            )  # fmt: skip
            widest = next(iter(links.values()), None)
            joined = None if widest is None else {**links, "": widest}
            self._traced_jobs[key] = TracedJob(self._job, how, how.divided(self._job, self._first), joined)
        return self._traced_jobs[key]

    def shape_of(self, mesh: MeshShape, units: int) -> Shape:
        """The shape of a micro-batch of so many units on a mesh."""
        return replace(self._how, mesh=mesh).shape_of(self._job, units)

    def model(
        self, mesh: MeshShape, stages: int, sizes: Sequence[Shape], units: int, modes: Mapping[str, str],
        links: Mapping[str, GroupLink] | None = None, *, schedule: str = "1f1b",
    ) -> StageModel:  # fmt: skip
        """The stages of a pipeline for micro-batches of so many units under these modes of recomputing.

        Args:
            stages: as many as the mesh has for them, or a multiple.
            sizes: one or two micro-batches that are traced; the costs of others lie on the line through them.
            links: what joins the ranks of each dimension; None: what they tell each other takes no time.
            schedule: of what is on its way; with ``stages`` as many as it has.

        Raises:
            InputError: the nets cannot be cut so.
        """
        chain = pipeline_modules(self._job, self._nets, stages, f"pp={mesh.pp}")
        paths = chain.paths
        allowed = may_be_stage([find_module(self._nets, path) for path in paths], chain.joined)
        cut = replace(without_data_ranks(mesh), pp=1)
        together = [joined_name(cut.expert_dimensions)] if cut.sending > 1 else []
        joined = {name: links[name] for name in (*together, *cut.sizes())} if links else {}
        traced = [self._costs(self._traced_job(cut, joined), paths, shape, modes, cut.shards) for shape in sizes]
        costs = traced[0].at(units, traced[-1])
        return StageModel(
            paths=paths, costs=costs, stages=stages, allowed=allowed, shards=mesh.shards, schedule=schedule
        )

    def without_single_items(self, split: list[Geometry], modes: Mapping[str, str]) -> tuple[list[Geometry], str]:
        """As ``memfit.planner.search.candidate_search`` has it."""
        traced_job = self._traced_job(MeshShape(), {})
        try:
            return without_single_items(traced_job, split, modes)
        finally:
            traced_job.pause()

    def _costs(
        self, traced_job: TracedJob, paths: Sequence[str], shape: Shape, modes: Mapping[str, str], shards: int
    ) -> ModuleCosts:
        key = (id(traced_job), shape, frozenset(modes.items()))
        if key not in self._known:
            try:
                self._known[key] = trace_module_costs(traced_job, paths, shape, modes, shards, timed=self._timed)
            finally:
                traced_job.pause()
        return self._known[key]
