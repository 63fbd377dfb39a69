"""The longest samples of a loader's data set, of which every batch is made where the largest batch is searched.

Batches that are padded to their longest sample differ in size with the samples that come together. The largest batch is
one that fits whatever comes together, and its bytes follow from the size alone where all samples are the longest.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from memfit.script.outcome import ALL_LONGEST, NOT_ALL_LONGEST
from memfit.torch_compat.data_workers import index_sampler, replace_indices
from memfit.wording import counted

MOST_SAMPLES = 20_000
"""Samples of a data set that are read."""
MOST_SECONDS = 10.0
"""The most time that reading them takes."""
_LOOKED_AT = 64
"""Batches of a sampler whose numbers of samples are compared."""
_DEEPEST = 4


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest samples of a data set.

    Attributes:
        indices: one for each part of a sample (a source and a target, say) whose longest is another one's; the one with
            most elements first.
        read: samples that were read.
        varies: whether the parts of samples differ in size.
    """

    indices: tuple[int, ...]
    read: int
    varies: bool


class LongestSamples:
    """Makes the batches of loaders of the longest samples of their data sets.

    Args:
        note: is told what batches were made of, or why they were not.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._known: dict[int, tuple[Any, Longest | None]] = {}

    def replace(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Replaces the indices of an iterator's batches, as many of them as the sampler gives for each."""
        if isinstance(loader.dataset, IterableDataset):
            self._note(f"{NOT_ALL_LONGEST}{type(loader.dataset).__name__} gives its samples in an order of its own")
            return
        if index_sampler(loader) is not loader.batch_sampler:
            self._note(f"{NOT_ALL_LONGEST}the script makes batches itself of what its loader reads")
            return
        longest = self._longest(loader.dataset)
        if longest is None:
            self._note(f"{NOT_ALL_LONGEST}the samples of {type(loader.dataset).__name__} cannot be read one by one")
            return
        replace_indices(iterator, lambda batches: self._of_longest(batches, longest, type(loader.batch_sampler)))

    def _of_longest(self, batches: Iterator[Any], longest: Longest, sampler: type) -> Iterator[Any]:
        first = list(islice(batches, _LOOKED_AT))
        ((samples, times),) = Counter(map(len, first)).most_common(1) or [(0, 0)]
        if len(first) - times > 1:  # the last of a pass may have fewer
            counts = sorted(map(len, first))
            self._note(f"{NOT_ALL_LONGEST}{sampler.__name__} gives batches of {counts[0]} to {counts[-1]} samples")
            yield from chain(first, batches)
            return
        if longest.varies:
            self._note(f"{ALL_LONGEST}{counted(longest.read, 'sample')} that were read of its data set")
        for _ in chain(first, batches):
            yield [longest.indices[place % len(longest.indices)] for place in range(samples)]

    def _longest(self, data_set: Any) -> Longest | None:
        """Those of a data set, read once; None where it has no length, or its samples cannot be read one by one."""
        if id(data_set) not in self._known:
            with _random_kept():
                self._known[id(data_set)] = data_set, _read(data_set)
        return self._known[id(data_set)][1]


def _read(data_set: Any) -> Longest | None:
    begin = time.monotonic()
    most: dict[Any, tuple[int, int]] = {}
    totals: dict[int, int] = {}
    least: dict[Any, int] = {}
    try:
        count = len(data_set)
        for index in _spread(count):
            sizes = dict(_sizes(data_set[index]))
            totals[index] = sum(sizes.values())
            for part, size in sizes.items():
                least[part] = min(size, least.get(part, size))
                if size > most.get(part, (-1, 0))[0]:
                    most[part] = size, index
            if time.monotonic() - begin > MOST_SECONDS:
                break
    except Exception:  # whatever a data set raises where it is read out of its order
        return None
    if not totals:
        return None
    varying = [index for part, (size, index) in most.items() if size != least[part]]
    chosen = sorted(set(varying), key=lambda index: -totals[index]) or [max(totals, key=lambda index: totals[index])]
    return Longest(indices=tuple(chosen), read=len(totals), varies=bool(varying))


def _spread(count: int) -> Iterator[int]:
    """Indices of a data set: all of them, or some from all over it, in an order that leaves no part to the end."""
    step = max(1, count // MOST_SAMPLES)
    indices = list(range(0, count, step))
    random.Random(0).shuffle(indices)
    return iter(indices)


def _sizes(sample: Any, part: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """(place, elements) of each part of a sample that has a size."""
    if isinstance(sample, Tensor | numpy.ndarray):
        shape = tuple(sample.shape)
        yield from ((((*part, "dimension", dim), size)) for dim, size in enumerate(shape))
    elif isinstance(sample, str | bytes):
        yield part, len(sample)
    elif isinstance(sample, Mapping):
        for name, value in sample.items():
            yield from _sizes(value, (*part, name)) if len(part) < _DEEPEST else ()
    elif isinstance(sample, tuple) and len(part) < _DEEPEST:
        for place, value in enumerate(sample):
            yield from _sizes(value, (*part, place))
    elif isinstance(sample, Sequence):
        yield part, len(sample)


@contextmanager
def _random_kept() -> Iterator[None]:
    """A context that leaves the random streams of the host as they were."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
