"""Errors of predictions, in the words of the benchmark's answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.accuracy_parts.gpumemnet import Predicted
from bench.accuracy_parts.table import MIB, Run

CLOSE = 0.05
"""Part of the card's memory around its limit within which nobody is asked for a verdict."""


def summary(rows: Sequence[Predicted], usable_bytes: int) -> dict[str, Any]:
    """Statistics as fractions. Errors are of the runs that ran; fits of those and of the ones that did not fit."""
    ran = [row for row in rows if row.run.label == "ran"]
    if not ran:
        return {"runs": 0}
    judged = [row for row in rows if row.run.label in ("ran", "does not fit")]
    clear = [row for row in judged if abs(row.need / usable_bytes - 1) > CLOSE]
    smooth = set(map(id, regular([row.run for row in ran])))
    without_trials = np.abs([row.error for row in ran if id(row.run) in smooth])
    errors = np.array([row.error for row in ran])
    sizes = np.abs(errors)
    return {
        "runs": len(ran),
        "median": float(np.median(sizes)),
        "mean": float(sizes.mean()),
        "p90": float(np.percentile(sizes, 90)),
        "p95": float(np.percentile(sizes, 95)),
        "within_5_percent": float((sizes <= 0.05).mean()),
        "worst_under": float(max(-errors.min(), 0.0)),
        "worst_over": float(max(errors.max(), 0.0)),
        "fits_right": _part(judged, lambda row: row.fits == (row.run.label == "ran")),
        "fits_right_clear": _part(clear, lambda row: row.fits == (row.run.label == "ran")),
        "verdicts_wrong_clear": _part(clear, lambda row: row.verdict == ("no" if row.run.label == "ran" else "yes")),
        "verdicts_close_clear": _part(clear, lambda row: row.verdict == "close"),
        "coverage": _part(ran, _inside),
        "regular_runs": len(without_trials),
        "regular_coverage": _part([row for row in ran if id(row.run) in smooth], _inside),
        "regular_median": float(np.median(without_trials)) if len(without_trials) else None,
        "regular_p95": float(np.percentile(without_trials, 95)) if len(without_trials) else None,
        "did_not_fit": len(judged) - len(ran),
        "models": len({row.run.model for row in rows}),
    }


def _inside(row: Predicted) -> bool:
    return row.low <= row.run.measured_mib * MIB <= row.high


def _part(rows: Sequence[Predicted], wanted: Any) -> float | None:
    return sum(map(wanted, rows)) / len(rows) if rows else None


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """The value that minimises the weighted sum of absolute differences."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def context_of(rows: Sequence[Predicted], context_bytes: int) -> int:
    """Bytes outside the allocator that leave the least relative error, in whole MiB."""
    ran = [row for row in rows if row.run.label == "ran"]
    measured = np.array([row.run.measured_mib for row in ran])
    reserved = np.array([(row.process_bytes - context_bytes) / MIB for row in ran])
    return round(weighted_median(measured - reserved, 1 / measured)) * MIB


def regular(runs: Sequence[Run], above: float = 0.1) -> list[Run]:
    """The runs of models none of whose readings shows cuDNN's trials, of at least three.

    By the measurements alone: a reading shows trials that lies above what a larger batch reads, or far above the line
    through the model's other readings. That is no need of the run.
    """
    by_model: dict[str, list[Run]] = {}
    for run in runs:
        by_model.setdefault(run.model, []).append(run)
    return [
        run
        for some in by_model.values()
        if len(some) >= 3 and not any(_shows_trials(run, some, above) for run in some)
        for run in some
    ]


def _shows_trials(run: Run, runs: Sequence[Run], above: float) -> bool:
    others = [other for other in runs if other is not run]
    falls = any(other.batch > run.batch and other.measured_mib < 0.98 * run.measured_mib for other in others)
    return falls or run.measured_mib > (1 + above) * _line(others, run.batch)


def _line(runs: Sequence[Run], batch: int) -> float:
    """Theil and Sen's line: the median of the slopes, and of what they leave; MiB at a batch."""
    slopes = [
        (run.measured_mib - other.measured_mib) / (run.batch - other.batch)
        for run, other in itertools.combinations(runs, 2)
        if run.batch != other.batch
    ]
    slope = float(np.median(slopes))
    line = float(np.median([run.measured_mib - slope * run.batch for run in runs])) + slope * batch
    return max(line, 1.0)


def shortest_interval(errors: Sequence[float], part: float = 0.95) -> tuple[float, float]:
    """The shortest interval that holds this part of the errors and, of one more run, is expected to."""
    ordered = sorted(errors)
    inside = min(len(ordered), math.ceil(part * (len(ordered) + 1)))
    widths = [ordered[i + inside - 1] - ordered[i] for i in range(len(ordered) - inside + 1)]
    first = int(np.argmin(widths))
    return ordered[first], ordered[first + inside - 1]
