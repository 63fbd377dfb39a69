"""The two things that are fitted, on the fitting half of the models alone: the context's bytes, and the margins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import memfit.replay
from bench.accuracy_parts.gpumemnet import Predicted
from bench.accuracy_parts.statistics import context_of, regular, shortest_interval
from bench.accuracy_parts.table import MIB, Run, is_fitting_half
from memfit import toml
from memfit.replay.margins import margins

FITTED = Path(__file__).with_name("fitted.toml")
MARGINS = Path(memfit.replay.__file__).with_name("margins.toml")
PART = 0.99
"""Part of a kind's runs that its margins hold, of models that show no trials of cuDNN: with those, 95 % of all of the
fitting half."""
FEWEST = 99
"""Runs from which a kind of net has margins of its own: of fewer, not even the range is expected to hold ``PART``."""


def context_bytes() -> int:
    """What a process of the measured stack holds outside the allocator."""
    return int(toml.loads(FITTED.read_text())["context_mib"]) * MIB


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
    smooth = set(map(id, regular([row.run for row in ran])))
    errors: dict[str, list[float]] = {}
    for row in (row for row in ran if id(row.run) in smooth):
        predicted = (row.process_bytes - before + context) / MIB
        errors.setdefault(row.net_kind, []).append(row.run.measured_mib / predicted - 1)
    lines = [
        "# Written by bench/accuracy.py --fit: bounds of measured / predicted process bytes - 1, by kind of net.",
        "# From one half of the models of a public table of timm runs (A100 40 GB, nvidia-smi once a second), without",
        "# the readings that show cuDNN's trials.",
    ]
    for kind, relative in sorted(errors.items(), key=lambda pair: -len(pair[1])):
        if len(relative) >= FEWEST:
            low, high = shortest_interval(relative, PART)
            bounds = f"low = {min(low, 0.0):.4f}\nhigh = {max(high, 0.0):.4f}\nruns = {len(relative)}"
            lines.append(f'\n["{kind}"]\n{bounds}')
    MARGINS.write_text("\n".join(lines) + "\n")
    margins.cache_clear()
