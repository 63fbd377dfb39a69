"""The sections of a report that show a run: memory, loss, speed and micro-batches by window; what each rank saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memfit.audit.strips_data import Picture
from memfit.plan import Plan
from memfit.show.page import Section, Table
from memfit.show.report_oom import flight_line
from memfit.show.run_log import Rank, noise_words, number, seen, shown_windows
from memfit.sizes import format_size
from memfit.train.metrics_file import expected_bytes

TABLE_ROWS = 24
MOST_RANKS = 16
SHOWN = ("measured_process_bytes", "loss", "units_per_second", "micro_batches", "retries", "validation_seconds")
FAR = 4
"""A budget that is so many times what was taken is told and not drawn."""


def run_verdict(path: Path, plan: Plan, lines: list[dict[str, Any]], *, runs: bool = False) -> tuple[str, str]:
    """One line, and its tone: what was done, and its peak against the budget.

    Args:
        runs: whether a process works on the run now.
    """
    failed = flight_line(path / "flight.json")
    why = f"; {failed}" if failed else ""
    if not lines and runs:
        return f"Running: no window is finished yet{why}", "close"
    if not lines:
        return f"Nothing was trained: no window was finished{why}", "bad"
    done = (path / "final").is_dir() and any((path / "final").iterdir())
    losses = [number(lines[i].get("loss")) for i in (0, -1)]
    peak = _peak(lines)
    memory = (
        f"; peak {format_size(peak)} of {format_size(plan.budget_bytes)}"
        if peak is not None
        else "; its memory is unknown"
    )
    first, last = losses
    loss = (
        "unknown" if first is None or last is None else f"{first:.4g}" + (f" to {last:.4g}" if len(lines) > 1 else "")
    )
    count = f"{len(lines)} window{'s' if len(lines) > 1 else ''}"
    within = peak is None or peak <= plan.budget_bytes
    if runs:
        return f"Running: {count} so far, loss {loss}{memory}{why}", "good" if within and not failed else "close"
    if done:
        return f"Done: {count}, loss {loss}{memory}", "good" if within else "close"
    return f"Not finished: stopped after {count}, loss {loss}{memory}{why}", "close" if within and not failed else "bad"


def run_sections(plan: Plan, lines: list[dict[str, Any]], ids: list[dict[str, Any]]) -> list[Section]:
    """Sections of a run's lines; none of what was not written."""
    sections = [_windows(plan, lines)] if lines else []
    given = seen(ids)
    if given is not None:
        picture, ranks = given
        text = (
            "From the ids that each window really applied. "
            "A bar's height is the part of the ids there that the rank was given."
        )
        sections.append(
            Section(
                title="What each rank saw",
                text=text,
                strips=[strips_of(picture, f"Ids 0 to {picture.size - 1}, the whole run", _ranks(ranks))],
            )
        )
    return sections


def _peak(lines: list[dict[str, Any]]) -> float | None:
    return max(
        (value for line in lines if (value := number(line.get("measured_process_bytes"))) is not None), default=None
    )


def _windows(plan: Plan, lines: list[dict[str, Any]]) -> Section:
    shown = shown_windows(lines, SHOWN)

    def column(name: str) -> list[float | None]:
        return [number(line.get(name)) for line in shown]

    measured, planned = column("measured_process_bytes"), [number(expected_bytes(line)) for line in shown]
    known = max((value for value in (*measured, *planned) if value is not None), default=plan.budget_bytes)
    near = plan.budget_bytes < FAR * known
    budget: list[float | None] = [plan.budget_bytes] * len(shown)
    memory = [
        panel_line("measured", measured, "accent"),
        panel_line("planned", planned, "quiet", dash="dot", symbol="square"),
        panel_line("budget", budget, "limit", dash="dash", symbol="line-ew") | {"far": not near},
    ]
    speed = f"{plan.unit} a second"
    panels = [
        panel("memory", memory, holds="bytes"),
        panel("loss", [panel_line("loss", column("loss"), "activations")], zero=False),
        panel(speed, [panel_line(speed, column("units_per_second"), "optimizer")]),
        panel("micro-batches", [panel_line("micro-batches", column("micro_batches"), "ema")], holds="counts"),
        *_monitored(plan, column),
    ]
    highest = max(known, plan.budget_bytes) if near else known
    figure = windows_figure([line["window"] for line in shown], panels, highest) | {"own_names": True}
    table = _window_table(plan, lines)
    return Section(
        title="The run, window by window",
        text=f"{_compared(lines)} {noise_words(lines, plan.unit)}".rstrip(),
        figure=figure,
        folded=[table],
    )


def _monitored(plan: Plan, column: Callable[[str], list[float | None]]) -> list[dict[str, Any]]:
    """Panels of what was monitored, where it was."""
    busy = [panel_line("CPU", column("cpu_utilisation"), "parameters")]
    busy += [panel_line("GPU", column("gpu_utilisation"), "gradients", dash="dash", symbol="square")]
    noise = [panel_line("noise scale", column("noise_scale"), "workspace")]
    noise += [
        panel_line("global batch", [plan.global_batch] * len(noise[0]["y"]), "quiet", dash="dot", symbol="square")
    ]
    spent = [panel_line("training", column("seconds"), "optimizer")]
    spent += [panel_line("validation", column("validation_seconds"), "limit", dash="dash", symbol="square")]
    panels = []
    if known := [line for line in busy if _known(line)]:
        panels.append(panel("part of the time busy", known))
    if _known(noise[0]):
        panels.append(panel(f"gradient noise scale, {plan.unit}", noise))
    if _known(spent[1]):
        panels.append(panel("seconds", spent))
    retries = panel_line("retries", column("retries"), "limit")
    if any(retries["y"]):
        panels.append(panel("retries", [retries], holds="counts"))
    return panels


def _known(line: dict[str, Any]) -> bool:
    return any(value is not None for value in line["y"])


def windows_figure(windows: list[int], panels: list[dict[str, Any]], highest: float) -> dict[str, Any]:
    """Panels over one axis of windows; ``highest`` bytes decide the unit of those that hold bytes."""
    return {"kind": "windows", "id": "windows", "own_names": False, "x": windows, "panels": panels, "highest": highest}


def panel(name: str, curves: list[dict[str, Any]], *, holds: str = "", zero: bool = True) -> dict[str, Any]:
    """One panel of a figure, of ``bytes``, ``counts`` or other numbers."""
    return {"name": name, "bytes": holds == "bytes", "whole": holds == "counts", "zero": zero, "lines": curves}


def panel_line(
    name: str, values: list[float | None], colour: str, *, dash: str = "", symbol: str = "circle"
) -> dict[str, Any]:
    """One line of a panel; ``colour`` is a name of report.css."""
    return {"name": name, "y": values, "colour": colour, "dash": dash, "symbol": symbol}


def _compared(lines: list[dict[str, Any]]) -> str:
    peak = _peak(lines)
    planned = max((value for line in lines if (value := number(expected_bytes(line))) is not None), default=None)
    if peak is None or not planned:
        return "Planned or measured memory is unknown."
    off = f"{abs(peak / planned - 1):.1%} {'more' if peak > planned else 'less'}"
    return f"The highest window took {format_size(peak)}, where {format_size(planned)} was planned: {off}."


def _window_table(plan: Plan, lines: list[dict[str, Any]]) -> Table:
    chosen = np.unique(np.linspace(0, len(lines) - 1, min(TABLE_ROWS, len(lines))).astype(int)).tolist()

    def text(line: dict[str, Any], name: str, form: str) -> str:
        value = number(expected_bytes(line) if name == "planned" else line.get(name))
        return "unknown" if value is None else format_size(value) if form == "size" else format(value, form)

    forms = {
        "measured_process_bytes": "size",
        "planned": "size",
        "loss": ".4g",
        "units_per_second": ",.4g",
        "micro_batches": "g",
        "global_batch_done": ",g",
        "seconds": ".3g",
    }
    rows = [(str(lines[i]["window"]), *(text(lines[i], name, form) for name, form in forms.items())) for i in chosen]
    columns = (
        "window",
        "measured",
        "planned",
        "loss",
        f"{plan.unit} a second",
        "micro-batches",
        f"{plan.unit} done",
        "seconds",
    )
    caption = (
        "Every window in figures" if len(chosen) == len(lines) else f"{len(chosen)} of {len(lines)} windows in figures"
    )
    return Table(caption=caption, columns=columns, rows=rows, numeric=columns[1:])


def _ranks(ranks: list[Rank]) -> Table:
    columns = ("rank", "windows", "samples given", "distinct", "most often given")
    rows = [(f"rank {r.rank}", f"{r.windows:,}", f"{r.samples:,}", f"{r.distinct:,}", f"{r.most:,} ×") for r in ranks]
    return Table(caption="The same in figures", columns=columns, rows=rows, numeric=columns[1:])


def strips_of(picture: Picture, title: str, table: Table | None = None) -> dict[str, Any]:
    """A picture as bars over ids, and over steps where lengths are known; heights are parts of 1."""
    ranks = min(len(picture.share), MOST_RANKS)
    rows = [_strip(f"rank {rank}", picture.share[rank]) for rank in range(ranks)]
    if ranks < len(picture.share):
        title += f"; the first {ranks} of {len(picture.share)} ranks"
    rows.append(_strip("all", picture.together, "all"))
    groups = [{"axis": ("id 0", f"id {picture.size - 1:,}"), "rows": rows}]
    if picture.length is not None and picture.padding is not None:
        longest = float(np.nanmax(picture.length)) if np.isfinite(picture.length).any() else 1.0
        axis = ("step 0", f"step {picture.steps - 1:,}")
        lengths = [
            _strip(
                f"len {rank}", picture.length[rank] / (longest or 1), note=f"max {np.nanmax(picture.length[rank]):,.4g}"
            )
            for rank in range(min(ranks, 4))
        ]
        padding = [_strip(f"pad {rank}", picture.padding[rank]) for rank in range(min(ranks, 4))]
        groups += [
            {"axis": (f"mean length, {axis[0]}", axis[1]), "rows": lengths},
            {"axis": (f"padding, {axis[0]}", axis[1]), "rows": padding},
        ]
    return {"title": title, "groups": groups, "table": table}


def _strip(label: str, parts: np.ndarray, kind: str = "", note: str = "") -> dict[str, Any]:
    """One strip as an SVG path: a bar for each column, as high as its part."""
    parts = np.clip(np.nan_to_num(parts), 0, 1)
    bars = [f"M{i} 1V{1 - part:.3f}H{i + 1}V1Z" for i, part in enumerate(parts.tolist()) if part > 0]
    return {
        "label": label,
        "kind": kind,
        "note": note or f"{parts.mean():.0%}",
        "path": {"d": "".join(bars), "columns": len(parts)},
    }
