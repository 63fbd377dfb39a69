"""The meshes of a search in the terminal: what else fits, what is slower, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from memfit.planner.mesh_search.mesh_row import CHOSEN, REFUSED, SLOWER, TOO_LARGE, MeshRow
from memfit.sizes import format_size

SHOWN = 12
"""Rows in the terminal; the JSON has all of them."""


def show_meshes(rows: Sequence[MeshRow], console: Console) -> None:
    """Prints the meshes, the best first; nothing without any."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, title="\nMeshes", title_justify="left", title_style="default")
    for name in ("mesh", "engine", "split", "recompute"):
        table.add_column(name)
    for name in ("process", "a window"):
        table.add_column(name, justify="right")
    table.add_column("")
    refused = [row for row in rows if row.state == REFUSED]
    shown = [row for row in rows if row.state != REFUSED]
    for row in shown[:SHOWN]:
        table.add_row(
            str(row.mesh), row.engine, row.arithmetic or "-", row.policy or "-", _peak(row), _seconds(row), _state(row)
        )
    console.print(table)
    if len(shown) > SHOWN:
        console.print(f"and {len(shown) - SHOWN} more; --json lists all", style="dim")
    for remark in dict.fromkeys(row.remark for row in refused):
        meshes = [str(row.mesh) for row in refused if row.remark == remark]
        more = f" and {len(meshes) - 1} more" if len(meshes) > 1 else ""
        console.print(f"Refused: {meshes[0]}{more}: {remark}", style="dim")


def _peak(row: MeshRow) -> str:
    if row.peak is None:
        return "-"
    least = "at least " if row.remark else ""
    return f"{least}{format_size(row.peak)}"


def _seconds(row: MeshRow) -> str:
    if row.seconds is None or row.state == TOO_LARGE:
        return "-"
    return f"{'at least ' if row.state == SLOWER else ''}{row.seconds:.3g} s"


def _state(row: MeshRow) -> str:
    how = "traced" if row.traced else "estimated"
    words = {CHOSEN: "chosen", SLOWER: "slower", TOO_LARGE: "does not fit"}.get(row.state, "fits")
    return f"{words}, {row.remark}" if row.remark else words if row.state == SLOWER else f"{words}, {how}"
