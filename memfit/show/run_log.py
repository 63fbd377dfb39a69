"""A run's lines of metrics and ids, reduced to what a page shows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memfit.plan import Plan
from memfit.show.timeline import extremes
from memfit.train import metrics_file
from memfit.train.run_files import check_run_file

if TYPE_CHECKING:
    from memfit.audit.strips_data import Picture

LARGEST_ID = 1 << 40
MOST = 1500
"""Windows that a plot shows at most."""


def noise_words(lines: list[dict[str, Any]], unit: str) -> str:
    """What the last known gradient noise scale of a run says about its global batch; empty where none is known."""
    known = (last_scale for line in reversed(lines) if (last_scale := number(line.get("noise_scale"))) is not None)
    noise = next(known, None)
    if noise is None:
        return ""
    wastes = "a global batch far above it wastes samples (McCandlish et al. 2018)"
    return f"Noise scale about {noise:.0f} {unit}: {wastes}."


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank was given in the whole run."""

    rank: int
    windows: int
    samples: int
    distinct: int
    most: int
    """Times that the most frequent sample was given."""


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file of a run; none where there is no file. Damaged lines are left out.

    Raises:
        InputError: it is a folder, or cannot be read.
    """
    check_run_file(path)
    return metrics_file.read_lines(path).lines


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def shown_windows(lines: list[dict[str, Any]], names: Iterable[str], most: int = MOST) -> list[dict[str, Any]]:
    """At most ``most`` of the lines, with the extremes of every named column in every stretch."""
    if len(lines) <= most:
        return lines
    columns = [np.array([number(line.get(name)) or 0.0 for line in lines]) for name in names]
    kept = [extremes(column, [(0, len(lines))], most // len(columns)) for column in columns]
    return [lines[i] for i in np.unique(np.concatenate([*kept, [0, len(lines) - 1]])).tolist()]


def seen(lines: list[dict[str, Any]], columns: int = 64) -> tuple[Picture, list[Rank]] | None:
    """What each rank was given, over ids from 0 to the largest that occurs; None where no ids were written."""
    from memfit.audit.strips_data import Picture  # its package imports torch, which a run's summary does not need

    ids: dict[int, list[int]] = {}
    for line in lines:
        given = line.get("ids")
        if isinstance(given, list) and isinstance(line.get("rank"), int):
            ids.setdefault(line["rank"], []).extend(i for i in given if isinstance(i, int) and 0 <= i < LARGEST_ID)
    size = max((max(given) + 1 for given in ids.values() if given), default=0)
    if not size:
        return None
    columns = min(columns, size)
    counted = {rank: np.unique(np.array(ids[rank], np.int64), return_counts=True) for rank in sorted(ids)}
    everyone = np.unique(np.concatenate([distinct for distinct, _ in counted.values()]))
    picture = Picture(
        world=len(counted),
        size=size,
        share=np.stack([_share(distinct, size, columns) for distinct, _ in counted.values()]),
        together=_share(everyone, size, columns),
        steps=0,
        length=None,
        padding=None,
    )
    ranks = [
        Rank(
            rank=rank,
            windows=sum(line.get("rank") == rank for line in lines),
            samples=int(times.sum()),
            distinct=len(distinct),
            most=int(times.max(initial=0)),
        )
        for rank, (distinct, times) in counted.items()
    ]
    return picture, ranks


def _share(distinct: np.ndarray, size: int, columns: int) -> np.ndarray:
    """Part of the ids of each column that is there; column c begins at id ceil(c x size / columns)."""
    edges = -(-np.arange(columns + 1, dtype=np.int64) * size // columns)
    return np.diff(np.searchsorted(distinct, edges)) / np.diff(edges)


def process_peaks(plan: Plan) -> dict[str, float]:
    """Predicted bytes of the process by phase, where the plan has them."""
    peaks = {name: number(phase.get("process_bytes")) for name, phase in plan.phases.items() if isinstance(phase, dict)}
    return {name: peak for name, peak in peaks.items() if peak is not None}
