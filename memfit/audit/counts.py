"""What the streams of a world come to: samples, batches, steps, padding, imbalance."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.audit.loader_parts import Declared
from memfit.audit.streams import AuditWorld, RankStream, distinct_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """Counts of one world. Those of an epoch are of the first one."""

    world: int
    size: int
    """Samples of the data set: as it says, or else all ids that were ever seen."""
    batches_per_rank: list[int]
    samples_per_rank: list[int]
    distinct_per_rank: list[int]
    distinct: int
    """Different samples over all ranks."""
    draws: int
    """Samples given over all ranks, repeats included."""
    late_repeats: int
    """Repeats given in the last step of the epoch: what pads it."""
    missing_ids: np.ndarray
    """Ids that no rank was given; empty where ids are names, or indices into a part of the data set."""
    order_changes: bool | None
    """None: there is no second epoch."""
    in_order: bool
    """Every rank goes through its ids from the lowest to the highest; of an iterable data set, whose workers take
    turns, within each batch."""
    steps_per_rank: list[list[int]] | None
    """Optimizer steps of each epoch, for each rank."""
    windows: tuple[int, ...]
    """Micro-batches of each optimizer step of rank 0 in the first epoch."""
    step_samples: np.ndarray
    """Samples over all ranks in each step: of a window where there are windows, else of one batch a rank."""
    step_units: np.ndarray | None
    """Padded units of each step; None where lengths are unknown."""
    largest_batch: int
    padding: float | None
    imbalance: float | None
    """Work that the ranks wait for: sum of the slowest rank's load over the mean load of the steps, less one."""

    @property
    def missing(self) -> int:
        return max(0, self.size - self.distinct)

    @property
    def duplicates(self) -> int:
        return self.draws - self.distinct

    @property
    def slack(self) -> int:
        """Samples of one full step over all ranks."""
        return self.world * max(1, self.largest_batch)


def declared(world: AuditWorld) -> Declared:
    """What rank 0's loader says of itself."""
    return world.drawn[0].declared


def dataset_size(worlds: Mapping[int, AuditWorld]) -> int:
    """Samples of the data set: what loaders and samplers say, at least all the different ids of any epoch.

    Indices tell of samples that no one draws: with nothing else to go by, holes in them are taken for missing samples
    as long as there are less than a tenth of them.
    """
    said = [drawn.declared.size for world in worlds.values() for drawn in world.drawn]
    seen = [distinct_ids(np.concatenate([s.ids for s in epoch])) for world in worlds.values() for epoch in world.epochs]
    distinct = len(distinct_ids(np.concatenate(seen))) if seen else 0
    most = max((int(ids[-1]) + 1 for ids in seen if len(ids)), default=0)
    if any(drawn.declared.some_only for world in worlds.values() for drawn in world.drawn):
        return distinct
    if any(said):
        return max(distinct, *(size for size in said if size))
    numbered = all(world.numbered for world in worlds.values())
    return most if numbered and distinct >= 0.9 * most else distinct


def count(world: AuditWorld, size: int) -> Counts:
    """Counts of one world over a data set of ``size`` samples."""
    first = world.epochs[0]
    ids = np.concatenate([stream.ids for stream in first])
    seen = distinct_ids(ids)
    sequences = [np.concatenate([stream.ids for stream in epoch]).tolist() for epoch in world.epochs]
    missing = np.delete(np.arange(size), seen[seen < size]) if world.numbered else seen[:0]
    windows = [stream.windows for stream in first]
    samples, units = _steps(first)
    return Counts(
        world=world.world,
        size=size,
        batches_per_rank=[len(stream.sizes) for stream in first],
        samples_per_rank=[len(stream.ids) for stream in first],
        distinct_per_rank=[len(distinct_ids(stream.ids)) for stream in first],
        distinct=len(seen),
        draws=len(ids),
        late_repeats=_late_repeats(first),
        missing_ids=missing if len(missing) == size - len(seen) else missing[:0],
        order_changes=sequences[0] != sequences[1] if len(sequences) > 1 else None,
        in_order=all(_in_order(world, stream) for stream in first),
        steps_per_rank=None if windows[0] is None else _steps_taken(world),
        windows=windows[0] or (),
        step_samples=samples,
        step_units=units,
        largest_batch=max((int(stream.sizes.max(initial=0)) for stream in first), default=0),
        padding=_padding(first),
        imbalance=_imbalance(first),
    )


def _in_order(world: AuditWorld, stream: RankStream) -> bool:
    if not declared(world).streamed:
        return world.numbered and bool(np.all(np.diff(stream.ids) > 0))
    keys = [_natural(world.name(number)) for number in stream.ids.tolist()]
    ends = np.cumsum(stream.sizes).tolist()
    grouped = max(ends, default=0) > len(ends)
    return grouped and all(
        keys[i] < keys[i + 1] for start, end in zip([0, *ends], ends, strict=False) for i in range(start, end - 1)
    )


def _natural(name: Hashable) -> list[tuple[int, str]]:
    """Names in the order of the numbers in them: clip2 before clip10."""
    parts = re.split(r"(\d+)", str(name))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _steps_taken(world: AuditWorld) -> list[list[int]]:
    ranks = range(len(world.drawn))
    return [[len(epoch[rank].windows or ()) for epoch in world.epochs] for rank in ranks]


def _late_repeats(streams: tuple[RankStream, ...]) -> int:
    """Repeats whose last occurrence is in the last step: taken together with the steps before, they were given."""
    last = max((len(stream.sizes) for stream in streams), default=0) - 1
    early, late = [], []
    for stream in streams:
        at = int(stream.sizes[:last].sum()) if last >= 0 else 0
        early.append(stream.ids[:at])
        late.append(stream.ids[at:])
    before, after = distinct_ids(np.concatenate(early)), np.concatenate(late)
    return len(after) - int((~np.isin(distinct_ids(after), before)).sum())


def _steps(streams: tuple[RankStream, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """Samples and padded units of each step over all ranks."""
    samples = [by_window(stream, stream.sizes) for stream in streams]
    padded = [stream.padded() for stream in streams]
    units = [by_window(stream, load) for stream, load in zip(streams, padded, strict=True) if load is not None]
    return _summed(samples), _summed(units) if len(units) == len(streams) else None


def by_window(stream: RankStream, loads: np.ndarray) -> np.ndarray:
    """Loads of batches, summed over each window that lies in the epoch; as they are where there are no windows."""
    if not stream.windows:
        return loads
    ends = np.cumsum(stream.windows) - (sum(stream.windows) + stream.left_over - len(loads))
    sums = np.concatenate([[0], np.cumsum(loads)])
    return np.diff(sums[np.concatenate([[0], np.clip(ends, 0, len(loads))])])


def _summed(loads: list[np.ndarray]) -> np.ndarray:
    total = np.zeros(max(map(len, loads), default=0))
    for load in loads:
        total[: len(load)] += load
    return total


def _padding(streams: tuple[RankStream, ...]) -> float | None:
    if any(stream.lengths is None for stream in streams):
        return None
    padded = sum(float(load.sum()) for stream in streams if (load := stream.padded()) is not None)
    filled = sum(float(stream.lengths.sum()) for stream in streams if stream.lengths is not None)
    return 1 - filled / padded if padded else 0.0


def _imbalance(streams: tuple[RankStream, ...]) -> float | None:
    loads: list[Any] = [stream.padded() if stream.lengths is not None else stream.sizes for stream in streams]
    steps = min(map(len, loads))
    if not steps:
        return None
    together = np.stack([load[:steps] for load in loads])
    mean = float(together.mean(axis=0).sum())
    return float(together.max(axis=0).sum()) / mean - 1 if mean else None
