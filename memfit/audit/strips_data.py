"""What each rank is given, as small tables to be drawn: over ids, and over the steps of an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.audit.counts import Counts
from memfit.audit.streams import AuditWorld, distinct_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """The first epoch of one world in ``columns`` columns."""

    world: int
    size: int
    """Samples of the data set, which the columns of ``share`` and ``together`` divide."""
    share: np.ndarray
    """(ranks, columns): part of the ids of a column that the rank is given."""
    together: np.ndarray
    """(columns,): part of the ids of a column that some rank is given."""
    steps: int
    """Steps of the epoch, which the columns of ``length`` and ``padding`` divide."""
    length: np.ndarray | None
    """(ranks, columns): mean length of the samples of these steps; NaN where a rank has none. None: unknown."""
    padding: np.ndarray | None
    """(ranks, columns): padded units that hold no sample, as a part of all."""

    def to_json(self) -> dict[str, Any]:
        """Plain lists, rounded; null where there is nothing."""
        return {
            "world": self.world,
            "size": self.size,
            "steps": self.steps,
            "share": np.round(self.share, 3).tolist(),
            "together": np.round(self.together, 3).tolist(),
            "length": _plain(self.length),
            "padding": _plain(self.padding),
        }


def picture_of(world: AuditWorld, counts: Counts, columns: int) -> Picture:
    """Ids in order of the data set (of first appearance, where they are names), in at most ``columns`` columns."""
    streams = world.epochs[0]
    top = max((int(stream.ids.max(initial=-1)) + 1 for stream in streams), default=0)
    size = max(counts.size, top, 1)
    columns = min(columns, size)
    held = np.bincount(np.arange(size) * columns // size, minlength=columns)
    seen = [distinct_ids(stream.ids) for stream in streams]
    share = np.stack([np.bincount(ids * columns // size, minlength=columns) / held for ids in seen])
    everyone = distinct_ids(np.concatenate(seen))
    steps = max(counts.batches_per_rank, default=0)
    known = steps and all(stream.lengths is not None for stream in streams)
    over_time = [_over_time(stream, steps, min(columns, steps)) for stream in streams] if known else None
    return Picture(
        world=world.world,
        size=size,
        share=share,
        together=np.bincount(everyone * columns // size, minlength=columns) / held,
        steps=steps,
        length=np.stack([length for length, _ in over_time]) if over_time else None,
        padding=np.stack([padding for _, padding in over_time]) if over_time else None,
    )


def _over_time(stream: Any, steps: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    column = np.arange(len(stream.sizes)) * columns // steps
    samples = np.bincount(column, weights=stream.sizes, minlength=columns)
    padded = np.bincount(column, weights=stream.padded(), minlength=columns)
    filled = np.bincount(np.repeat(column, stream.sizes), weights=stream.lengths, minlength=columns)
    with np.errstate(invalid="ignore", divide="ignore"):
        return filled / samples, 1 - filled / padded


def _plain(values: np.ndarray | None) -> list[list[float | None]] | None:
    if values is None:
        return None
    return [[None if np.isnan(value) else round(float(value), 4) for value in row] for row in values]
