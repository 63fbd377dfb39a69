"""PipelineCosts: the modules of a job's pipeline and what they cost, traced on one device when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memfit.blocks import find_module
from memfit.engine.pipeline_cut import pipeline_modules
from memfit.engine.stage_bounds import may_be_stage
from memfit.geometry import Geometry
from memfit.job import Job, Nets, Shape
from memfit.mesh import MeshShape
from memfit.planner.pipeline.module_costs import ModuleCosts, trace_module_costs
from memfit.planner.pipeline.stage_model import StageModel
from memfit.planner.search.candidate_search import without_single_items
from memfit.planner.search.traced_job import TracedJob
from memfit.trace.step import Tracing


class PipelineCosts:
    """Costs of micro-batches on the device of a trace.

    Args:
        nets: the job's, whole, without their bytes.
        how: of any rank; the costs are those of one device.
        first: the micro-batch with which the job is set up.
        timed: as of ``trace_module_costs``.
    """

    def __init__(self, job: Job, nets: Nets, how: Tracing, first: Shape, *, timed: bool = True) -> None:
        alone = replace(how, engine="single", world=1, rank=0, mesh=None, engine_choices={})
        self._traced_job = TracedJob(job, alone, first)
        self._job, self._nets, self._timed = job, nets, timed
        self._known: dict[tuple[Shape, frozenset[tuple[str, str]]], ModuleCosts] = {}

    def model(
        self, mesh: MeshShape, stages: int, sizes: Sequence[Shape], units: int, modes: Mapping[str, str]
    ) -> StageModel:
        """The stages of a pipeline for micro-batches of so many units under these modes of recomputing.

        Args:
            stages: as many as the mesh has for them, or a multiple.
            sizes: one or two micro-batches that are traced; the costs of others lie on the line through them.

        Raises:
            InputError: the nets cannot be cut so.
        """
        paths = pipeline_modules(self._job, self._nets, stages, f"pp={mesh.pp}")
        allowed = may_be_stage([find_module(self._nets, path) for path in paths])
        traced = [self._costs(paths, shape, modes) for shape in sizes]
        costs = traced[0].at(units, traced[-1])
        return StageModel(paths=paths, costs=costs, stages=stages, allowed=allowed, shards=mesh.dp_shard)

    def without_single_items(self, split: list[Geometry], modes: Mapping[str, str]) -> tuple[list[Geometry], str]:
        """As ``memfit.planner.search.candidate_search`` has it."""
        try:
            return without_single_items(self._traced_job, split, modes)
        finally:
            self._traced_job.pause()

    def _costs(self, paths: Sequence[str], shape: Shape, modes: Mapping[str, str]) -> ModuleCosts:
        key = (shape, frozenset(modes.items()))
        if key not in self._known:
            try:
                self._known[key] = trace_module_costs(self._traced_job, paths, shape, modes, timed=self._timed)
            finally:
                self._traced_job.pause()
        return self._known[key]
