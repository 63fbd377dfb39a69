"""When will an epoch meet its largest batch? From a sampler whose order is known, and the samples' lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler

from memfit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class EpochLengths:
    """The padded units of the largest micro-batch of each optimizer step of an epoch: items x longest length."""

    units: tuple[float, ...]

    @property
    def largest_step(self) -> int:
        """The step with the largest micro-batch, the first of several."""
        return max(range(len(self.units)), key=lambda step: self.units[step])

    def rises_at(self, step: int) -> bool:
        """Whether this step of the epoch holds the largest micro-batch, and is not the first."""
        return 0 < step == self.largest_step


def epoch_lengths(batches: Iterable[Sequence[int]], lengths: Sequence[float], accumulate: int = 1) -> EpochLengths:
    """The padded units of each step.

    Args:
        batches: a batch sampler with an order of its own (``LengthBatchSampler``, one over ``DistributedSampler``), or
            a list of batches of sample numbers.
        lengths: length of every sample.
        accumulate: batches of one optimizer step.

    Raises:
        InputError: a random order that nobody knows before, no batch, or a sample without a length.
    """
    sampler = batches.sampler if isinstance(batches, BatchSampler) else batches
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        write = "draw the order before: DataLoader(..., batch_sampler=list(batch_sampler))"
        raise InputError("the batch sampler", "its order is drawn when the epoch begins", write)
    if accumulate < 1:
        raise InputError(f"accumulate={accumulate}", "less than one batch a step", "write 1 or more")
    units: list[float] = []
    source: Any = iter(batches)
    try:
        while window := list(islice(source, accumulate)):
            units.append(max(len(ids) * max(float(lengths[i]) for i in ids) for ids in window))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        write = "write batches of sample numbers, and a length for each sample"
        raise InputError("epoch_lengths", f"a batch has no lengths ({type(error).__name__})", write) from error
    if not units:
        raise InputError("the batch sampler", "it gives no batch", "write a sampler of a data set with samples")
    return EpochLengths(units=tuple(units))
