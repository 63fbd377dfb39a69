"""Windows: which samples each optimizer step learns from. A function of (seed, epoch, position) alone.

Nothing is dropped and nothing repeated: the last window of an epoch is short, its loss normalised by what it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.batch.cost import PaddedCost
from memfit.batch.lengths import as_lengths
from memfit.batch.rank_split import balanced, even
from memfit.errors import InputError
from memfit.plan import Plan

Share = tuple[tuple[int, ...], ...]
"""Sample ids of each micro-batch of one rank."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window: its number over the whole run, its epoch, and the sample ids of each rank's micro-batches."""

    number: int
    epoch: int
    ranks: tuple[Share, ...]

    @property
    def micro_batches(self) -> Share:
        """The micro-batches of every rank."""
        return tuple(micro for share in self.ranks for micro in share)

    @property
    def ids(self) -> tuple[int, ...]:
        """Every sample of the window."""
        return self.ids_of(range(len(self.ranks)))

    def ids_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Every sample of these ranks."""
        return tuple(i for rank in ranks for micro in self.ranks[rank] for i in micro)


class Windows:
    """The windows of a run over a data set.

    Where samples have lengths, a window takes samples as long as their padded units stay within the global batch, and
    a micro-batch holds samples of similar length whose padded units stay within the micro-batch. Which samples a window
    holds does not depend on the number of ranks.

    Args:
        size: samples in the data set.
        lengths: units of each sample; None where a sample is one unit.
        global_batch, micro_batch: in units.
        seed: of the order.
        ranks: data-parallel ranks; they get equal numbers of samples, or, where samples have lengths, equal cost.

    Raises:
        InputError: an empty data set, or a sample longer than a micro-batch.
    """

    def __init__(
        self,
        *,
        size: int,
        lengths: Sequence[int] | None,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        ranks: int = 1,
    ) -> None:
        if size < 1:
            raise InputError(
                "data set of 0 samples", "there is nothing to train on", "give dataset() at least one sample"
            )
        checked = None if lengths is None else as_lengths(lengths)
        if checked is not None and len(checked) != size:
            raise InputError(
                f"{len(checked)} lengths",
                f"the data set has {size} samples",
                "give lengths() one number for each sample",
            )
        self._lengths = None if checked is None else checked.astype(np.int64)
        if self._lengths is not None and int(self._lengths.max()) > micro_batch:
            longest = int(self._lengths.argmax())
            raise InputError(
                f"sample {longest} of length {int(self._lengths[longest])}",
                f"longer than a micro-batch of {micro_batch}",
                "plan a larger --micro-batch, or leave the sample out of the data set",
            )
        self._size, self._global, self._micro, self._seed = size, global_batch, micro_batch, seed
        self._ranks, self._cost = ranks, PaddedCost()
        self._epochs: dict[int, list[tuple[Share, ...]]] = {}
        self._starts = [0]

    @classmethod
    def of_plan(cls, plan: Plan, *, size: int, lengths: Sequence[int] | None, ranks: int = 1) -> Windows:
        """The windows of a plan's run over ``size`` samples.

        Raises:
            InputError: see the class.
        """
        return cls(
            size=size,
            lengths=lengths,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch,
            seed=plan.seed,
            ranks=ranks,
        )

    def window(self, number: int) -> Window:
        """The window of this number, counted over all epochs from 0."""
        while self._starts[-1] <= number:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        epoch = bisect_right(self._starts, number) - 1
        return Window(number=number, epoch=epoch, ranks=self._epoch(epoch)[number - self._starts[epoch]])

    def last_of_epoch(self, number: int) -> int:
        """The number of the last window of the epoch in which the window of this number lies."""
        return self._starts[self.window(number).epoch + 1] - 1

    def per_epoch(self, epoch: int) -> int:
        """Windows in an epoch."""
        return len(self._epoch(epoch))

    def _epoch(self, epoch: int) -> list[tuple[Share, ...]]:
        if epoch not in self._epochs:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._size)
            self._epochs = {epoch: self._pack(order) if self._lengths is not None else self._slice(order)}
        return self._epochs[epoch]

    def _slice(self, order: np.ndarray) -> list[tuple[Share, ...]]:
        ids = order.tolist()
        windows = [ids[i : i + self._global] for i in range(0, len(ids), self._global)]
        return [even(window, self._micro, self._ranks) for window in windows]

    def _pack(self, order: np.ndarray) -> list[tuple[Share, ...]]:
        assert self._lengths is not None
        windows: list[Share] = []
        packed: list[int] = []
        for sample in order.tolist():
            if packed and self._padded(self._chunks([*packed, sample])) > self._global:
                windows.append(self._chunks(packed))
                packed = []
            packed.append(sample)
        windows.append(self._chunks(packed))
        return [balanced(window, self._lengths, self._cost, self._ranks) for window in windows]

    def _chunks(self, ids: list[int]) -> tuple[tuple[int, ...], ...]:
        """Samples of similar length together, longest first, each chunk within a micro-batch."""
        assert self._lengths is not None
        chunks: list[list[int]] = []
        for sample in sorted(ids, key=lambda i: (-int(self._lengths[i]), i)):  # type: ignore[index]
            if chunks and int(self._lengths[chunks[-1][0]]) * (len(chunks[-1]) + 1) <= self._micro:
                chunks[-1].append(sample)
            else:
                chunks.append([sample])
        return tuple(map(tuple, chunks))

    def _padded(self, chunks: tuple[tuple[int, ...], ...]) -> int:
        assert self._lengths is not None
        return sum(int(self._lengths[chunk[0]]) * len(chunk) for chunk in chunks)
