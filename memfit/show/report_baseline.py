"""The section of a report that says what would have happened without the plan: the job as its project has it."""

from __future__ import annotations

from memfit.apply.phase_memory import with_settings
from memfit.footprint import Footprint
from memfit.geometry import shape_of
from memfit.job import Job
from memfit.plan import Plan
from memfit.planner.predict import Prediction, predict
from memfit.show.page import Section, Table
from memfit.sizes import format_size


def untouched_section(job: Job, plan: Plan, planned: Prediction) -> list[Section]:
    """The same micro-batches on the same device, with the job's own recomputing, wrapper, step, validation and saving.

    Nothing where the plan has taken no lever that saves anything.

    Args:
        planned: the plan's own footprint.
    """
    if not any(lever.taken and lever.saves_bytes for lever in plan.levers) and not plan.validation.settings:
        return []
    own = with_settings(job, {"wrapper": type(job).wrapper})
    shape, count = shape_of(own, plan.micro_batch), len(plan.micro_batches[0])
    found = predict(own, plan.job, shape, planned.device, micro_batches=count).footprint
    return [Section(title="Without the plan", text=_told(found, plan), tables=[_phases(found, planned.footprint)])]


def _told(found: Footprint, plan: Plan) -> str:
    own = "As the job has it, in the same micro-batches and with no room made for validation and saving, "
    peak = format_size(found.phases[found.limiting_phase].process_bytes)
    if found.failed_request is None:
        allowed = format_size(plan.budget_bytes)
        return f"{own}it would take {peak} at the most, in {found.limiting_phase}; {allowed} are allowed."
    failed = found.failed_request
    where = f"{failed.module or 'the step'} ({failed.operator or 'unknown'})"
    return f"{own}it would have died in {failed.phase}: {format_size(failed.bytes)} asked for in {where} are not there."


def _phases(found: Footprint, planned: Footprint) -> Table:
    rows = []
    for name, phase in found.phases.items():
        under = planned.phases.get(name)
        here = "–" if under is None else format_size(under.process_bytes)
        died = found.failed_request is not None and name == found.failed_request.phase
        place = f"{phase.at.module or 'the step'} ({phase.at.operator})"
        rows.append((name, format_size(phase.process_bytes), here, "died here" if died else "–", place))
    return Table(
        caption="Peaks by phase; of the job as it is, what it would have taken with memory without end",
        columns=("phase", "as the job has it", "under the plan", "", "peak of the job's own in"),
        rows=rows,
        numeric=("as the job has it", "under the plan"),
        code=("peak of the job's own in",),
    )
