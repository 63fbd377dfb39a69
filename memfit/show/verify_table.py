"""What verify found, in the terminal."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from memfit.plan import Plan
from memfit.show.console import make_console


def show_verified(verified: dict[str, Any], plan: Plan) -> None:
    """Prints the worlds and the findings."""
    console = make_console(emoji=False)
    same = all(world["ok"] for world in verified["worlds"])
    faults = dict.fromkeys(finding["code"] for finding in verified["findings"] if finding["kind"] == "fault")
    verdict = f"[bold {'green' if verified['ok'] else 'red'}]{'The same' if same else 'Not the same'}[/]"
    worlds = " and ".join(str(world["world"]) for world in verified["worlds"])
    mesh = next((f" ({world['mesh']})" for world in verified["worlds"] if world["mesh"]), "")
    fault = f", with a fault: {', '.join(faults)}" if same and faults else ""
    console.print(f"{verdict} on {worlds} ranks{mesh}{fault}.")
    batch = f"{plan.global_batch} {plan.unit} a window, at most {plan.micro_batch} at once, fp32"
    console.print(f"{escape(plan.job)}: {batch}.")
    table = Table(box=None, pad_edge=False)
    for name in ("ranks", "engine", "loss", "gradients", "weights", "bound", "of bound"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for world in verified["worlds"]:
        apart = world["max_relative_difference"]
        of_bound = None if None in world["of_bounds"].values() else max(world["of_bounds"].values())
        table.add_row(
            str(world["world"]),
            world["engine"],
            *(_apart(apart[part]) for part in ("loss", "gradients", "parameters")),
            f"{world['bound']:.1e}",
            f"[{'green' if world['ok'] else 'red'}]{_share(of_bound)}[/]",
        )
    console.print(table)
    console.print()
    for finding in verified["findings"]:
        mark = "[red]fault[/]" if finding["kind"] == "fault" else "[yellow]note[/]"
        console.print(f"{mark} {finding['code']}: {escape(finding['text'])}")


def _apart(relative: float | None) -> str:
    return "not finite" if relative is None else f"{relative:.1e}"


def _share(of_bound: float | None) -> str:
    """How much of its bound a difference takes: in percent, or from ten times on in times."""
    if of_bound is None:
        return "more than any"
    return (
        f"{of_bound:.0%}"
        if of_bound < 10
        else f"{of_bound:.0f} times"
        if of_bound < 10_000
        else f"{of_bound:.0e} times"
    )
