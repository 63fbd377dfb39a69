"""One epoch's batches by padded cost: vectorised, exact, the same number on every rank.

Samples are sorted by length, longest first, in random order among equals; a step is the next ``world`` batches of that
order, all with the same number of samples: as many as the step's longest sample leaves room for. So the ranks of a step
hold neighbouring lengths and wait little for each other, and steps are then shuffled. The number that fits changes at
few places of the order, so the only loop is over those.

What it does not do: mix short and long samples in a step. Training therefore sees runs of like lengths within a step;
``noise`` widens the choice (see ``LengthBatchSampler``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from memfit.batch.cost import PaddedCost
from memfit.errors import InputError

Remainder = Literal["error", "empty", "repeat", "drop"]

_RADIX = 1 << 16
"""Classes of lengths at most: numpy sorts 16-bit keys by radix, several times faster than wider ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthClasses:
    """Samples classed by length, the longest class first. Inside a class their order is free."""

    of_sample: np.ndarray
    """uint16 (N,): the class of every sample."""
    longest: np.ndarray
    """(classes,): the longest length in each class; of an empty class, one between those of its neighbours."""


def length_classes(lengths: np.ndarray, noise: float = 0.0) -> LengthClasses:
    """Classes of relative width ``noise``; of equal whole lengths where it is 0.

    Real-valued lengths, and whole ones over a range of 65,536 or more, are classed as finely as 65,536 classes allow:
    lengths from 1 to 100, for instance, within 0.007 %.
    """
    if not len(lengths):
        return LengthClasses(of_sample=np.empty(0, dtype=np.uint16), longest=lengths)
    least, most = lengths.min(), lengths.max()
    if not noise and lengths.dtype.kind == "i" and most - least < _RADIX:
        return LengthClasses(of_sample=(most - lengths).astype(np.uint16), longest=np.arange(most, least - 1, -1))
    width = max(np.log1p(noise), np.log(most / least) / (_RADIX - 2), 1e-12)
    classes = np.log(lengths)
    np.subtract(np.log(most), classes, out=classes)
    classes /= width
    keys = np.clip(classes, 0, _RADIX - 1).astype(np.uint16)
    del classes
    longest = np.zeros(int(keys.max()) + 1, dtype=lengths.dtype)
    np.maximum.at(longest, keys, lengths)
    return LengthClasses(of_sample=keys, longest=np.maximum.accumulate(longest[::-1])[::-1])


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """Batches of one epoch: batch (s, r) of step s and rank r holds ``order[starts[s, r]:][:counts[s, r]]``."""

    order: np.ndarray
    """int64 (N,): sample ids, longest first."""
    starts: np.ndarray
    """int64 (steps, world): the first sample of each batch in ``order``."""
    counts: np.ndarray
    """int64 (steps, world): samples of each batch."""
    repeated: np.ndarray
    """int64: ids given once more so that every rank has a batch; empty unless asked for."""
    dropped: np.ndarray
    """int64: ids left out so that every rank has as many batches; empty unless asked for."""

    @property
    def steps(self) -> int:
        return len(self.starts)

    def ids(self, step: int, rank: int) -> np.ndarray:
        """Sample ids of one batch."""
        start = self.starts[step, rank]
        return self.order[start : start + self.counts[step, rank]]

    def left_after(self, step: int) -> np.ndarray:
        """Ids that no batch before ``step`` has given, sorted."""
        edges = np.zeros(len(self.order) + 1, dtype=np.int64)
        np.add.at(edges, self.starts[:step], 1)
        np.add.at(edges, self.starts[:step] + self.counts[:step], -1)
        return np.sort(self.order[np.cumsum(edges[:-1]) == 0])


def plan_epoch(
    classes: LengthClasses,
    ids: np.ndarray | None = None,
    *,
    cost: PaddedCost,
    budget: float,
    max_items: int | None,
    world: int,
    seed: tuple[int, ...],
    remainder: Remainder = "error",
) -> EpochPlan:
    """The batches of one epoch, a function of its arguments alone.

    Args:
        classes: of all samples; none that is planned may be longer than ``budget`` allows for one item.
        ids: the samples to plan; all of them by default.

    Raises:
        InputError: some rank would have no batch, and ``remainder`` is "error".
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(classes.of_sample) if ids is None else ids).astype(np.int64, copy=False)
    drawn = classes.of_sample[order]
    order = order[np.argsort(drawn, kind="stable")]
    sizes = np.bincount(drawn, minlength=1)
    present = np.flatnonzero(sizes)
    ends = np.cumsum(sizes[present])
    most = cost.most_items(classes.longest[present], budget)
    if max_items is not None:
        most = np.minimum(most, max_items)
    regions = _regions(ends, most)
    counts = _count_by_step(regions, len(order), world)
    short = 0
    if counts is None:
        counts = _count_by_batch(regions, len(order), world)
    if counts is None:
        counts, short = _count_singles(len(order), world, remainder)
    starts = np.cumsum(counts) - counts
    repeated = dropped = order[:0]
    if short and remainder == "repeat":
        again = np.arange(short) % len(order)
        starts[-short:], counts[-short:] = again, 1
        repeated = np.sort(order[again])
    elif short and remainder == "drop":
        dropped = np.sort(order[len(order) - short :])
    steps = rng.permutation(len(counts) // world)
    turns = (np.arange(world) + rng.integers(world, size=(len(steps), 1))) % world
    return EpochPlan(
        order=order,
        starts=np.take_along_axis(starts.reshape(-1, world)[steps], turns, axis=1),
        counts=np.take_along_axis(counts.reshape(-1, world)[steps], turns, axis=1),
        repeated=repeated,
        dropped=dropped,
    )


def _regions(ends: np.ndarray, most: np.ndarray) -> list[tuple[int, int]]:
    """(past the last sample, samples a batch) of each stretch of the order in which the same number of samples fits."""
    last = np.flatnonzero(np.append(most[1:] != most[:-1], len(most) > 0))
    return list(zip(ends[last].tolist(), most[last].tolist(), strict=True))


def _count_by_step(regions: list[tuple[int, int]], num_samples: int, world: int) -> np.ndarray | None:
    """Samples of each batch, the batches of a step alike; None where the last step cannot give every rank a sample."""
    sizes, steps, at = [], [], 0
    for end, items in regions:
        needed = max(0, -(-(end - at) // (items * world)))
        if needed:
            sizes.append(items)
            steps.append(needed)
            at += needed * items * world
    counts = np.repeat(np.array(sizes, dtype=np.int64), np.array(steps, dtype=np.int64) * world)
    excess = at - num_samples
    if not excess:
        return counts
    last = sizes[-1] * world - excess
    if last >= world:
        counts[-world:] = _spread(last, world)
        return counts
    if len(counts) > world:
        both = int(counts[-world - 1]) * world + last
        if both >= 2 * world:
            counts[-2 * world :] = _spread(both, 2 * world)
            return counts
    return None


def _count_by_batch(regions: list[tuple[int, int]], num_samples: int, world: int) -> np.ndarray | None:
    """Samples of each batch, as few batches as the budget allows, the largest split until every rank has as many.

    None where there are not samples enough for that.
    """
    counts: list[int] = []
    at = 0
    for end, items in regions:
        needed = max(0, -(-(end - at) // items))
        counts += [items] * needed
        at += needed * items
    if counts:
        counts[-1] -= at - num_samples
    wanted = -(-len(counts) // world) * world
    if wanted > num_samples:
        return None
    while len(counts) < wanted:
        largest = max(range(len(counts)), key=counts.__getitem__)
        pieces = min(counts[largest], wanted - len(counts) + 1)
        counts[largest : largest + 1] = _spread(counts[largest], pieces).tolist()
    return np.array(counts, dtype=np.int64)


def _count_singles(num_samples: int, world: int, remainder: Remainder) -> tuple[np.ndarray, int]:
    """Batches of one sample, and how many ranks of the last step have none: what is left when nothing can be split.

    With "drop" the second number is of samples that are left out instead.
    """
    over = num_samples % world
    if remainder == "error":
        raise InputError(
            f"{num_samples} samples on {world} ranks",
            f"no batch can be split further, so {world - over} ranks would have none in the last step",
            "allow remainder='repeat' or 'drop' (counted and named), or 'empty' where the loop takes an empty batch",
        )
    if remainder == "drop":
        return np.ones(num_samples - over, dtype=np.int64), over
    counts = np.ones(num_samples + world - over, dtype=np.int64)
    counts[num_samples:] = 0
    return counts, world - over


def _spread(samples: int, batches: int) -> np.ndarray:
    """``samples`` over ``batches`` as evenly as whole numbers allow, the larger ones first."""
    return np.full(batches, samples // batches) + (np.arange(batches) < samples % batches)
