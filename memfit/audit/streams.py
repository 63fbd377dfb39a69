"""What ranks drew, as arrays: ids as whole numbers, an epoch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.audit.ids import Batch
from memfit.audit.observe import Drawn


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStream:
    """Batches of one rank in one epoch."""

    ids: np.ndarray
    """int64 (samples,)."""
    sizes: np.ndarray
    """int64 (batches,): samples of each batch."""
    lengths: np.ndarray | None
    """float64 (samples,); None where they are unknown."""
    windows: tuple[int, ...] | None
    """Micro-batches of each optimizer step of the epoch, those carried over from the last epoch included."""
    left_over: int = 0
    """Micro-batches after the epoch's last step."""

    def padded(self) -> np.ndarray | None:
        """float64 (batches,): samples times the longest, for each batch; None where lengths are unknown."""
        return self.sizes * self.longest() if self.lengths is not None else None

    def longest(self) -> np.ndarray:
        """float64 (batches,): the longest sample of each batch; 0 of an empty one."""
        assert self.lengths is not None
        longest = np.zeros(len(self.sizes))
        np.maximum.at(longest, np.repeat(np.arange(len(self.sizes)), self.sizes), self.lengths)
        return longest


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditWorld:
    """The streams of all ranks."""

    world: int
    epochs: tuple[tuple[RankStream, ...], ...]
    """For each epoch, the stream of every rank; one epoch only where there is no second."""
    drawn: tuple[Drawn, ...]
    numbered: bool
    """Ids are the indices of samples, not names."""
    names: Sequence[Hashable]
    """The name of each id, where they are not numbered."""

    def name(self, number: int) -> Hashable:
        return int(number) if self.numbered else self.names[int(number)]


def distinct_ids(ids: np.ndarray) -> np.ndarray:
    """The different ids, sorted. (numpy's own ``unique`` hashes, ten times slower on a million ids.)"""
    ordered = np.sort(ids)
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def streams_of(worlds: Mapping[int, Sequence[Drawn]]) -> dict[int, AuditWorld]:
    """Streams by world size, ids numbered alike in all of them."""
    batches = [batch for ranks in worlds.values() for drawn in ranks for batch in drawn.batches]
    numbered = all(type(index) is int and index >= 0 for batch in batches for index in batch.ids)
    numbers: dict[Hashable, int] = {}
    if not numbered:
        for batch in batches:
            for index in batch.ids:
                numbers.setdefault(index, len(numbers))
    repeats = _repeats(worlds)
    names = list(numbers)
    audit_worlds = {}
    for world, ranks in worlds.items():
        starts = _starts_of(ranks, repeats)
        shared = min(map(len, starts))
        epochs = tuple(
            tuple(
                _stream(drawn, own, epoch, None if numbered else numbers)
                for drawn, own in zip(ranks, starts, strict=True)
            )
            for epoch in range(min(shared, 2))
        )
        audit_worlds[world] = AuditWorld(world=world, epochs=epochs, drawn=tuple(ranks), numbered=numbered, names=names)
    return audit_worlds


def _repeats(worlds: Mapping[int, Sequence[Drawn]]) -> int:
    """Epochs of a loop that does not mark them: how often it draws each sample on a single rank."""
    drawn = [batch.ids for rank in worlds.get(1, ()) for batch in rank.batches]
    distinct = len({index for ids in drawn for index in ids})
    return max(1, round(sum(map(len, drawn)) / distinct)) if distinct else 1


def _starts_of(ranks: Sequence[Drawn], repeats: int) -> list[list[int]]:
    """The starts of epochs on each rank: as marked, else equally long, else where ids begin to repeat."""
    if any(drawn.epochs for drawn in ranks):
        return [list(drawn.epochs) or [0] for drawn in ranks]
    totals = [len(drawn.batches) for drawn in ranks]
    if all(total % repeats == 0 for total in totals):
        return [list(range(0, total, total // repeats)) if total else [0] for total in totals]
    seen: set[Hashable] = set()
    for step in range(min(totals)):
        ids = [index for drawn in ranks for index in drawn.batches[step].ids]
        if step > 0.75 * min(totals) / repeats and not seen.isdisjoint(ids):
            return [[0, step]] * len(ranks)
        seen.update(ids)
    return [[0]] * len(ranks)


def _stream(drawn: Drawn, starts: Sequence[int], epoch: int, numbers: Mapping[Hashable, int] | None) -> RankStream:
    begin, end = (*starts, len(drawn.batches))[epoch : epoch + 2]
    batches = drawn.batches[begin:end]
    windows, left_over = _windows(drawn.steps, begin, end)
    return RankStream(
        ids=_flat((_numbers(batch.ids, numbers) for batch in batches), np.int64),
        sizes=np.array([len(batch.ids) for batch in batches], dtype=np.int64),
        lengths=_lengths(batches, drawn, numbers is None),
        windows=windows,
        left_over=left_over,
    )


def _windows(steps: Sequence[int] | None, begin: int, end: int) -> tuple[tuple[int, ...] | None, int]:
    """Micro-batches of each window, and of none. Several optimizers that step after one batch end one window."""
    if steps is None:
        return None, 0
    edges = list(dict.fromkeys([0, *steps]))
    own = [(before, step) for before, step in itertools.pairwise(edges) if begin < step <= end]
    last = max([begin, *(step for _, step in own)])
    return tuple(step - before for before, step in own), end - last


def _lengths(batches: Sequence[Batch], drawn: Drawn, numbered: bool) -> np.ndarray | None:
    if batches and all(batch.lengths is not None for batch in batches):
        return _flat((batch.lengths for batch in batches), np.float64)
    known = drawn.declared.lengths
    if known is None or not numbered:
        return None
    ids = _flat((batch.ids for batch in batches), np.int64)
    return known[ids] if not len(ids) or ids.max() < len(known) else None


def _numbers(ids: Sequence[Any], numbers: Mapping[Hashable, int] | None) -> Sequence[int]:
    return ids if numbers is None else [numbers[index] for index in ids]


def _flat(parts: Iterable[Any], dtype: type) -> np.ndarray:
    return np.array([value for part in parts for value in part], dtype=dtype)
