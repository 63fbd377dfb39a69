"""What a report says beside its figures: what to do next, the same step on other cards, and commands that repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from memfit.device.hardware.catalogue import catalogue
from memfit.plan import Plan
from memfit.planner.prediction import Prediction, TracedQuestion, answer, holds_for
from memfit.show.page import Section, Table
from memfit.sizes import format_size

MEANINGS = (
    "Three figures of memory stand on this page. Tensor bytes are what tensors ask for. The predicted process adds "
    "what the allocator holds beyond them, the CUDA context on a card, and libraries. The measured process is what the "
    "system counted for the run, so compare it with the predicted process."
)


def advice_on_prediction(prediction: Prediction) -> str:
    """What to do about a prediction's verdict."""
    job, card = shlex.quote(prediction.job), prediction.device.key
    if prediction.footprint.verdict == "yes":
        return f"Plan the run: memfit plan {job} --global-batch N --device {card}. The largest batch: memfit max {job}."
    return (
        f"Find a micro-batch that fits with memfit max {job} --device {card}, let memfit plan {job} choose what to "
        f"recompute, or find a card that is large enough with memfit cards {job}."
    )


def advice_on_plan(path: Path, tone: str) -> str:
    """What to do with a plan, by the tone of its verdict."""
    file = shlex.quote(str(path))
    if tone == "good":
        return f"Run it: memfit run {file} --out RUN."
    if tone == "close":
        return f"Measure one step before the run: memfit probe {file}. A plan with --headroom 5% keeps a margin."
    return "Plan again with a smaller --global-batch, more --devices or a card of more memory."


def advice_on_run(path: Path, tone: str, *, done: bool, runs: bool = False) -> str:
    """What to do with a run.

    Args:
        runs: whether a process works on it now.
    """
    folder = shlex.quote(str(path))
    if runs:
        return f"It is still running. Write this page again later: memfit report {folder}."
    if not done:
        plan = shlex.quote(str(path / "plan.toml"))
        return f"Go on with it: memfit run {plan} --out {folder} --resume."
    over = "It took more than its budget: plan again with --headroom 5%. " if tone != "good" else ""
    nets = shlex.quote(str(path / "final"))
    return f"{over}The trained nets are in {nets}; validate them with memfit validate {folder}."


def command_section(commands: Sequence[str]) -> Section:
    """The commands that repeat what a report shows."""
    return Section(title="Commands that repeat it", commands=commands)


def plan_commands(path: Path) -> list[str]:
    """The commands that repeat a plan's figures and its run."""
    file = shlex.quote(str(path))
    return [f"memfit report {file}", f"memfit probe {file}", f"memfit run {file} --out RUN"]


def card_sections(question: TracedQuestion, plan: Plan) -> list[Section]:
    """The plan's step on the other cards for which its trace holds; none on a CPU."""
    cards = [card for key, card in catalogue().items() if card.usable_bytes and key != plan.device]
    rows = []
    for card in cards:
        if not card.is_cuda or not holds_for(question, card):
            continue
        footprint = answer(question, plan.job, card).footprint
        spare = footprint.headroom_bytes
        need = max(phase.process_bytes for phase in footprint.phases.values())
        rows.append(
            (card.key, footprint.verdict, format_size(need), format_size(card.usable_bytes or 0),
             f"{'-' if spare < 0 else ''}{format_size(abs(spare))}")
        )  # fmt: skip
    if not rows:
        return []
    table = Table(
        caption="This step on cards that run the same kernels",
        columns=("card", "fits", "process", "usable", "to spare"), rows=rows, numeric=("process", "usable", "to spare"),
    )  # fmt: skip
    text = f"Every card of the catalogue: memfit cards {shlex.quote(plan.job)}."
    return [Section(title="Other cards", text=text, tables=[table])]
