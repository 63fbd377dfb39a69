"""Two plans or two runs side by side: what differs, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from memfit.errors import InputError
from memfit.plan import Plan, read_plan
from memfit.show.page import Page, Section, Table
from memfit.show.report_run import panel, panel_line, windows_figure
from memfit.show.run_log import number, process_peaks, shown_windows, whole_lines
from memfit.sizes import format_size
from memfit.train.run_folder import RunFolder
from memfit.wording import counted, precision_words

NAMES = ("A", "B")
SAME = 5e-4
"""A relative difference below this one would be told as 0.0 %."""
COLUMNS = {
    "memory": "measured_process_bytes",
    "loss": "loss",
    "units a second": "units_per_second",
    "micro-batches": "micro_batches",
}


def compare_report(first: Path, second: Path) -> Page:
    """Two plan files or two run folders.

    Raises:
        InputError: one of each, or neither.
    """
    paths = (first, second)
    if first.is_dir() != second.is_dir():
        write = "write two plan files, or two run folders"
        raise InputError(f"--compare {first} {second}", "a run and a plan cannot be compared", write)
    runs = first.is_dir()
    plans = [read_plan(RunFolder(path).plan if runs else path) for path in paths]
    lines = [whole_lines(path / "metrics.jsonl") for path in paths] if runs else [[], []]
    sections = [Section(title="Side by side", tables=[_plans(plans), _memory(plans)])]
    if all(lines):
        figure = _figure(lines)
        sections.insert(0, Section(title="The runs, window by window", figure=figure, tables=[_runs(lines)]))
    return Page(
        title=f"comparison of two {'runs' if runs else 'plans'}",
        verdict=_verdict(plans, lines),
        tone="plain",
        about=[f"{name}: {path}" for name, path in zip(NAMES, paths, strict=True)],
        sections=sections,
    )


def _verdict(plans: list[Plan], lines: list[list[dict[str, Any]]]) -> str:
    """What B does to memory and to speed, against A."""
    peaks: list[float | None] = [_peak(plan) for plan in plans]
    speeds = [plan.step_seconds for plan in plans]
    what = "is predicted to take"
    if all(lines):
        peaks, what = [_highest(some, "measured_process_bytes") for some in lines], "took"
        speeds = [_mean(some, "seconds") for some in lines]
    said = [f"B {what} {_more(*peaks, size=True)} memory" if None not in peaks else "memory unknown"]
    if None not in speeds:
        said.append(f"{_more(*speeds)} time a window")
    return ", and ".join(said)


def _more(a: Any, b: Any, *, size: bool = False) -> str:
    """``12.0 MiB (8.1%) less``."""
    if a == b or (a and abs(b / a - 1) < SAME):
        return "the same"
    word = "more" if b > a else "less"
    part = f"{abs(b / a - 1):.1%}" if a else "unknown"
    return f"{format_size(abs(b - a))} ({part}) {word}" if size else f"{part} {word}"


def _plans(plans: list[Plan]) -> Table:
    def recomputed(plan: Plan) -> str:
        return counted(sum(mode != "keep" for mode in plan.checkpointing.values()), "module")

    def seconds(plan: Plan) -> str:
        return "unknown" if plan.step_seconds is None else f"{plan.step_seconds:.3g} s"

    facts = {
        "job": lambda plan: plan.job,
        "device": lambda plan: plan.device,
        "may take": lambda plan: format_size(plan.budget_bytes),
        "split": lambda plan: f"{plan.arithmetic} ({plan.unit})",
        "precision": lambda plan: precision_words(plan.precision, plan.net_kind),
        "engine": lambda plan: plan.engine,
        "recomputed": recomputed,
        "options applied": lambda plan: ", ".join(option.name for option in plan.options if option.applied) or "none",
        "window, estimated": seconds,
    }
    rows: list[tuple[str, ...]] = []
    for name, fact in facts.items():
        values = [fact(plan) for plan in plans]
        rows.append((name, *values, "same" if values[0] == values[1] else "≠ differs"))
    settings = {name: [str(plan.settings.get(name, "–")) for plan in plans] for plan in plans for name in plan.settings}
    rows += [(f"setting {name}", *values, "≠ differs") for name, values in settings.items() if values[0] != values[1]]
    caption = "The plans; settings of the job only where they differ"
    return Table(caption=caption, columns=("", *NAMES, ""), rows=rows, text=NAMES)


def _memory(plans: list[Plan]) -> Table:
    rows = []
    for name in dict.fromkeys(name for plan in plans for name in plan.phases):
        values = [process_peaks(plan).get(name) for plan in plans]
        known = None not in values
        rows.append((name, *map(_size, values), f"B: {_more(*values, size=True)}" if known else "unknown"))
    columns = ("phase", *NAMES, "difference")
    return Table(caption="Predicted peaks of the process", columns=columns, rows=rows, numeric=columns[1:])


def _runs(lines: list[list[dict[str, Any]]]) -> Table:
    def row(name: str, values: list[float | None], form: str) -> tuple[str, ...]:
        shown = [
            _size(value) if form == "size" else "unknown" if value is None else format(value, form) for value in values
        ]
        return (name, *shown, "unknown" if None in values else f"B: {_more(*values, size=form == 'size')}")

    rows = [
        row("windows", [float(len(some)) for some in lines], ",g"),
        row("highest memory measured", [_highest(some, "measured_process_bytes") for some in lines], "size"),
        row("last loss", [number(some[-1].get("loss")) for some in lines], ".4g"),
        row("mean units a second", [_mean(some, "units_per_second") for some in lines], ",.4g"),
        row("mean seconds a window", [_mean(some, "seconds") for some in lines], ".3g"),
    ]
    columns = ("", *NAMES, "difference")
    return Table(caption="The runs in figures", columns=columns, rows=rows, numeric=columns[1:])


def _figure(lines: list[list[dict[str, Any]]]) -> dict[str, Any]:
    kept = {line["window"] for some in lines for line in shown_windows(some, list(COLUMNS.values()), 700)}
    windows = sorted(kept)
    by_window = [{line["window"]: line for line in some} for some in lines]
    looks = ({"colour": "accent"}, {"colour": "activations", "dash": "dot", "symbol": "square"})
    panels = []
    for title, column in COLUMNS.items():
        values = [[number(values_of.get(window, {}).get(column)) for window in windows] for values_of in by_window]
        both = [panel_line(name, own, **look) for name, own, look in zip(NAMES, values, looks, strict=True)]
        holds = {"memory": "bytes", "micro-batches": "counts"}.get(title, "")
        panels.append(panel(title, both, holds=holds, zero=title != "loss"))
    highest = max((_highest(some, "measured_process_bytes") or 0 for some in lines), default=0)
    return windows_figure(windows, panels, highest)


def _peak(plan: Plan) -> float | None:
    return max(process_peaks(plan).values(), default=None)


def _values(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [value for line in lines if (value := number(line.get(name))) is not None]


def _highest(lines: list[dict[str, Any]], name: str) -> float | None:
    return max(_values(lines, name), default=None)


def _mean(lines: list[dict[str, Any]], name: str) -> float | None:
    values = _values(lines, name)
    return float(np.mean(values)) if values else None


def _size(nbytes: float | None) -> str:
    return "unknown" if nbytes is None else format_size(nbytes)
