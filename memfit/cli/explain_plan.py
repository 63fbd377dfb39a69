"""memfit explain of a plan: what it needs and where, and what the stages of its pipeline are predicted to take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.options import print_json

if TYPE_CHECKING:
    from memfit.plan import Plan

_PLAN = re.compile(rb"(\s|#[^\n]*\n)*memfit_plan\s*=")
_HEAD = 1 << 12
"""Bytes of a file in which a plan names its version, which comes first."""


def is_plan_file(name: str) -> bool:
    """Whether a file is one that memfit plan wrote; False where it cannot be read."""
    try:
        path = Path(name)
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _PLAN.match(file.read(_HEAD)) is not None
    except OSError:
        return False


def explain_plan(name: str, *, as_json: bool) -> None:
    """Prints a plan's peak, its phases and its stages.

    Raises:
        InputError: the plan cannot be read.
    """
    from memfit.plan import read_plan

    plan = read_plan(name)
    if as_json:
        print_json(_json(plan))
    else:
        _show(plan)


def _json(plan: Plan) -> dict[str, Any]:
    """With the keys of other files that have no failure in them."""
    return {
        "kind": "plan",
        "verdict": _verdict(plan),
        "cause": "none",
        "failures": [],
        "changes": [],
        "unknown": [],
        "job": plan.job,
        "device": plan.device,
        "budget_bytes": plan.budget_bytes,
        "arithmetic": plan.arithmetic,
        "engine": plan.engine,
        "mesh": plan.mesh,
        "phases": plan.phases,
        "stages": plan.stages,
        "step_seconds": plan.step_seconds,
        "reasons": plan.reasons,
    }


def _verdict(plan: Plan) -> str:
    """Where the plan needs most, by its own prediction."""
    from memfit.show.footprint_table import of_sizes, phase_name, place_name

    if not plan.phases:
        return "A plan without a prediction: memfit plan --out writes one."
    name = max(plan.phases, key=lambda phase: int(plan.phases[phase]["process_bytes"]))
    phase = plan.phases[name]
    at = phase.get("at", {}).get("module", "")
    sizes = of_sizes(phase["process_bytes"], plan.budget_bytes)
    return f"A plan: its peak is in {phase_name(name)}, {sizes} of {plan.device}, in {place_name(at, name)}."


def _show(plan: Plan) -> None:
    from memfit.printable import printable
    from memfit.show.console import make_console
    from memfit.show.plan_table import plan_phase_table
    from memfit.show.stage_table import stage_table

    console = make_console(emoji=False, markup=False)
    console.print(printable(_verdict(plan)), style="bold", soft_wrap=True)
    mesh = f", mesh {plan.mesh_shape}" if plan.mesh_shape else ""
    console.print(printable(f"{plan.job}: {plan.arithmetic} ({plan.unit}), {plan.engine}{mesh}\n"), soft_wrap=True)
    console.print(plan_phase_table(plan))
    if plan.stages:
        console.print(stage_table(plan.stages))
    console.print()
    for choice, reason in plan.reasons.items():
        if choice != "stages" or not plan.stages:
            console.print(printable(f"{choice}: {reason}"), soft_wrap=True)
