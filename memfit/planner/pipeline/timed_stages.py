"""Stages of equal seconds for a prediction, whose micro-batch is given."""

from __future__ import annotations

from memfit.engine.pipeline_cut import STAGES_OF_RANK, schedule_of
from memfit.engine.stage_bounds import FIRST_MODULES, named_bounds
from memfit.job import Job, Nets, Shape
from memfit.planner.pipeline.pipeline_costs import PipelineCosts
from memfit.planner.pipeline.stage_figures import StageFigures
from memfit.trace.step import Tracing


def timed_stages(job: Job, nets: Nets, how: Tracing, shape: Shape) -> tuple[StageFigures, ...]:
    """The stages that ``how`` names, or those whose slowest takes the least time on its device, by the device's rates.

    Args:
        nets: whole, without their bytes.
        how: of a rank of a pipeline.

    Raises:
        InputError: the nets cannot be cut so.
    """
    assert how.mesh is not None
    stages = how.stages * STAGES_OF_RANK[schedule_of(how.engine_choices)]
    costs = PipelineCosts(job, nets, how, shape, timed=False)
    model = costs.model(how.mesh, stages, (shape,), shape.units, how.checkpointing)
    named = how.engine_choices.get(FIRST_MODULES)
    if named:
        return model.figures(named_bounds(model.paths, named, stages, f"pp={how.stages}"))
    return model.figures(model.bounds(how.micro_batches))
