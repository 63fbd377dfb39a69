"""The benchmark's answers as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

console = Console(highlight=False)
_COLUMNS = (
    ("runs", "runs"), ("median", "median"), ("mean", "mean"), ("p90", "p90"), ("p95", "p95"),
    ("p95 without trials", "regular_p95"), ("within 5 %", "within_5_percent"), ("worst under", "worst_under"),
    ("fits right", "fits_right"), ("in interval", "coverage"),
)  # fmt: skip


def table(title: str, families: Mapping[str, Mapping[str, Any]], overall: Mapping[str, Any]) -> None:
    """Statistics by kind of net, and of all."""
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown.add_column("nets")
    for name, _ in _COLUMNS:
        shown.add_column(name, justify="right")
    for name, row in (*families.items(), ("all", overall)):
        shown.add_row(name, *(_cell(key, row.get(key)) for _, key in _COLUMNS))
    console.print(shown)
    if overall.get("fits_right_clear") is not None:
        console.print(
            f"More than 5 % from the limit: {_cell('', overall['fits_right_clear'])} of the fits are right, "
            f"{_cell('', overall['verdicts_wrong_clear'])} of the verdicts are wrong and "
            f"{_cell('', overall['verdicts_close_clear'])} say close.\n"
        )


def judged(title: str, overall: Mapping[str, Any], groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Statistics of a table in another format: of all, then the first few of them by group."""
    console.print(title)
    for name, value in overall.items():
        console.print(f"  {name.replace('_', ' '):<28}{_share(value)}")
    names = [name for name, value in overall.items() if value is not None][:6]
    for column, rows in groups.items():
        shown = Table(title=f"by {column}", title_justify="left", box=None, pad_edge=False)
        shown.add_column(column)
        for name in names:
            shown.add_column(name.replace("_", " "), justify="right")
        for value, row in rows.items():
            shown.add_row(value, *(_share(row.get(name)) for name in names))
        console.print(shown)


def _share(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1%}"


def ladder(result: Mapping[str, Any]) -> None:
    """Which rule brings how much."""
    shown = Table(title="One rule after another, same runs", title_justify="left", box=None, pad_edge=False)
    for name in ("rule", "constant MiB", "median", "mean", "p90", "p95", "within 5 %", "worst under"):
        shown.add_column(name, justify="left" if name == "rule" else "right")
    for row in result["rungs"]:
        cells = [row[key] for key in ("median", "mean", "p90", "p95", "within_5_percent", "worst_under")]
        shown.add_row(row["rule"], str(row["constant_mib"]), *(_cell("", cell) for cell in cells))
    console.print(shown)


def workspaces(entries: Sequence[Mapping[str, float]]) -> None:
    """Errors by factor of the convolution workspace."""
    tried = ", ".join(f"{entry['factor']:g}: {entry['median']:.2%}" for entry in entries)
    console.print(f"Median of the fitting half by factor of the convolution workspace: {tried}\n")


def cpu(rows: Sequence[Mapping[str, Any]]) -> None:
    """Traced and measured bytes on this CPU."""
    same = sum(row["traced_bytes"] == row["measured_bytes"] for row in rows)
    worst = max((abs(row["with_scratch_bytes"] / row["measured_with_scratch_bytes"] - 1) for row in rows), default=0)
    console.print(f"CPU truth: {same} of {len(rows)} phases to the byte; with operators' scratch within {worst:.2%}\n")


def cards(rows: Sequence[Mapping[str, Any]]) -> None:
    """Errors on cards of ours."""
    if not rows:
        return
    for key in ("allocated_error", "reserved_error"):
        sizes = np.abs([row[key] for row in rows if row["ok"] and row[key] is not None])
        if len(sizes):
            console.print(
                f"{key}: {len(sizes)} runs, median {np.median(sizes):.2%}, p95 {np.percentile(sizes, 95):.2%}"
            )


def published(rows: Sequence[Mapping[str, Any]]) -> None:
    """Figures of others' READMEs and issues, each with its own unknowns."""
    for row in rows:
        label = f"{row['job']} on {row['card']}, {row['phase']}"
        console.print(f"{label}: published {row['published']}, predicted {row['predicted_bytes'] / 2**30:.2f} GiB")


def failures(failed: Sequence[Any]) -> None:
    """Nets that could not be traced."""
    for entry in failed:
        console.print(f"not traced: {entry.model}: {entry.why}", style="yellow")


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if key == "runs" else f"{value:.2%}"
