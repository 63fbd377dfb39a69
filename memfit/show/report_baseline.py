"""The report's section on the job without the plan, as its project has it."""

from __future__ import annotations

from memfit.apply.phase_memory import with_settings
from memfit.footprint import Footprint
from memfit.geometry import shape_of
from memfit.job import Job
from memfit.plan import Plan
from memfit.planner.predict import Prediction, predict
from memfit.show.footprint_table import largest_process, of_sizes, phase_name, place_name
from memfit.show.page import Section, Table
from memfit.sizes import format_size


def untouched_section(job: Job, plan: Plan, planned: Prediction) -> list[Section]:
    """Predicts the same micro-batches on the same device with the job's own recomputing, wrapper, step and validation.

    Nothing where the plan applies no option that saves memory.

    Args:
        planned: the plan's own footprint.
    """
    if not any(option.applied and option.saves_bytes for option in plan.options) and not plan.validation.settings:
        return []
    own = with_settings(job, {"wrapper": type(job).wrapper})
    shape, count = shape_of(own, plan.micro_batch), len(plan.micro_batches[0])
    untouched = predict(own, plan.job, shape, planned.device, micro_batches=count).footprint
    return [
        Section(
            title="Without the plan",
            text=_without_plan(untouched, plan),
            tables=[_phases(untouched, planned.footprint)],
        )
    ]


def _without_plan(footprint: Footprint, plan: Plan) -> str:
    own = "With the job's own choices and the same micro-batches, "
    peak, limit = largest_process(footprint).process_bytes, plan.budget_bytes
    if footprint.failed_request is None:
        return f"{own}the peak is {of_sizes(peak, limit)}, in {phase_name(footprint.limiting_phase)}."
    failed = footprint.failed_request
    where = f"{place_name(failed.module, failed.phase)} ({failed.operator or 'unknown'})"
    size = format_size(failed.bytes)
    return f"{own}{phase_name(failed.phase)} runs out of memory: {where} fails to allocate {size}."


def _phases(footprint: Footprint, planned: Footprint) -> Table:
    rows = []
    for name, phase in footprint.phases.items():
        under = planned.phases.get(name)
        here = "–" if under is None else format_size(under.process_bytes)
        failed = footprint.failed_request is not None and name == footprint.failed_request.phase
        place = f"{place_name(phase.at.module, name)} ({phase.at.operator})"
        rows.append((name, format_size(phase.process_bytes), here, "out of memory" if failed else "–", place))
    return Table(
        caption="Peaks by phase; for the job without the plan, the need with unlimited memory",
        columns=("phase", "without the plan", "with the plan", "", "peak without the plan in"),
        rows=rows,
        numeric=("without the plan", "with the plan"),
        code=("peak without the plan in",),
    )
