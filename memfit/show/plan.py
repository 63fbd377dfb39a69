"""A plan in the terminal: the arithmetic first, then its memory, then each choice with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from memfit.sizes import format_size

if TYPE_CHECKING:
    from memfit.device.catalogue import Device
    from memfit.planner.search import Answer


def show_answer(answer: Answer, device: Device, out: str | None, console: Console | None = None) -> None:
    """What was found, or the shortfall."""
    console = console or Console(highlight=False)
    plan = answer.plan
    if plan is None:
        found = answer.floor.footprint
        console.print(
            "[bold red]Nothing fits[/]: "
            + f"{format_size(-found.headroom_bytes)} too much on {device.name} at the least, "
            f"with {answer.floor.policy} and {answer.floor.geometry.arithmetic()}."
        )
        if found.failed_request:
            console.print(
                f"{found.failed_request.phase} fails on {format_size(found.failed_request.bytes)} "
                f"in {found.failed_request.module or 'the step'}."
            )
        return
    console.print(f"[bold green]{plan.arithmetic}[/] ({plan.unit}), {plan.precision}, {plan.engine}")
    recomputed = sum(1 for mode in plan.checkpointing.values() if mode != "keep")
    time = f"about {plan.step_seconds:.2f} s a window" if plan.step_seconds is not None else "time of a window unknown"
    console.print(
        f"{plan.job} on {device.name}, {format_size(plan.budget_bytes)}; {recomputed} modules recomputed; {time}\n",
        style="dim",
    )
    table = Table(box=None, pad_edge=False)
    for name in ("phase", "allocated", "process", "of budget"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for name, phase in plan.phases.items():
        table.add_row(
            name,
            format_size(phase["allocated_bytes"]),
            format_size(phase["process_bytes"]),
            f"{phase['process_bytes'] / plan.budget_bytes:.0%}",
        )
    console.print(table)
    console.print()
    for choice, reason in plan.reasons.items():
        console.print(f"{choice}: {reason}", soft_wrap=False)
    levers = Table(box=None, pad_edge=False, title="\nLevers", title_justify="left", title_style="default")
    for name in ("lever", "taken", "saves", "costs"):
        levers.add_column(name)
    for lever in plan.levers:
        levers.add_row(
            lever.name,
            "yes" if lever.taken else "no",
            format_size(lever.saves_bytes) if lever.saves_bytes else "-",
            lever.costs,
        )
    console.print(levers)
    if out:
        console.print(f"\nWritten to {out}; run it with: memfit run {out} --out RUN")
