"""The two things that are fitted, on the fitting half of the models alone: the context's bytes, and the margins."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

import memfit.replay
from bench.accuracy_parts.gpumemnet import Predicted
from bench.accuracy_parts.statistics import context_of, shortest_interval, weighted_median
from bench.accuracy_parts.table import MIB, Run, is_fitting_half
from memfit.replay.margins import margins

FITTED = Path(__file__).with_name("fitted.toml")
MARGINS = Path(memfit.replay.__file__).with_name("margins.toml")
FEWEST = 20
"""Runs from which a kind of net has margins of its own."""
FACTORS = (0.0, 0.75, 1.0, 1.25, 1.5)


def context_bytes() -> int:
    """What a process of the measured stack holds outside the allocator."""
    return int(tomllib.loads(FITTED.read_text())["context_mib"]) * MIB


def half(runs: Sequence[Run]) -> list[Run]:
    """The runs that may be fitted on."""
    return [run for run in runs if is_fitting_half(run.model)]


def write(rows: Sequence[Predicted]) -> None:
    """Writes fitted.toml and memfit's margins.toml from predictions of the fitting half."""
    assert all(is_fitting_half(row.run.model) for row in rows)
    before = context_bytes()
    context = context_of(rows, before)
    ran = [row for row in rows if row.run.label == "ran"]
    models = len({row.run.model for row in ran})
    FITTED.write_text(
        "# Written by bench/accuracy.py --fit.\n"
        f"# Median of measured minus reserved, weighted by 1 / measured: {len(ran)} runs of {models} models.\n"
        f"context_mib = {context // MIB}\n"
    )
    errors: dict[str, list[float]] = {}
    for row in ran:
        predicted = (row.process_bytes - before + context) / MIB
        errors.setdefault(row.net_kind, []).append(row.run.measured_mib / predicted - 1)
    lines = [
        "# Written by bench/accuracy.py --fit: bounds of measured / predicted process bytes - 1, by kind of net.",
        "# From one half of the models of a public table of timm runs (A100 40 GB, nvidia-smi once a second).",
    ]
    for kind, found in sorted(errors.items(), key=lambda pair: -len(pair[1])):
        if len(found) >= FEWEST:
            low, high = shortest_interval(found)
            bounds = f"low = {min(low, 0.0):.4f}\nhigh = {max(high, 0.0):.4f}\nruns = {len(found)}"
            lines.append(f'\n["{kind}"]\n{bounds}')
    MARGINS.write_text("\n".join(lines) + "\n")
    margins.cache_clear()


def ladder(rows: Sequence[Predicted], folder: Path, console: Console) -> dict[str, Any]:
    """Errors with one rule after another, and with other factors of the convolution workspace."""
    from bench.accuracy_parts import ladder as parts
    from bench.accuracy_parts.traces import stored

    ran = [row.run for row in rows if row.run.label == "ran"]
    table = []
    factors = []
    for run in track(ran, "ladder", console=console):
        trace = stored(folder, run.model, [run.batch]).at(run.batch)
        table.append((run, parts.rungs(run, trace)))
        factors.append(parts.reserved_with_workspace(trace, FACTORS))
    measured = np.array([run.measured_mib for run in ran])
    tried = []
    for factor, reserved in zip(FACTORS, np.array(factors).T, strict=True):
        constant = weighted_median(measured - reserved, 1 / measured)
        sizes = np.abs(reserved + constant - measured) / measured
        tried.append({"factor": factor, "median": float(np.median(sizes)), "p90": float(np.percentile(sizes, 90))})
    return {"rungs": parts.errors(table), "convolution_workspace": tried}
