"""What can be read off a loader or sampler without running it: its parts, its data set, and what it declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from memfit.torch_compat.data_workers import chosen_sample_count

_INNER = (
    "sampler", "batch_sampler", "base_dataloader", "dataloader", "_dataloader", "loader", "_loader", "_sampler",
    "base_sampler", "data_sampler",
)  # fmt: skip
_DATA = ("dataset", "data_source", "_dataset", "data")
_LENGTHS = (
    "lengths", "lens", "length", "durations", "duration", "frames", "num_frames", "n_frames", "frame_lens",
    "frame_lengths", "num_tokens", "token_counts", "sizes", "seq_lens", "sample_lengths",
)  # fmt: skip
_LENGTH_CALLS = ("get_frame_len", "get_sample_length", "get_length", "get_len", "num_tokens", "size", "get_duration")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a loader, its samplers and data set say of themselves."""

    size: int | None = None
    """Samples of the data set; None where nothing says it."""
    lengths: np.ndarray | None = None
    """(size,): length of every sample, by id."""
    streamed: bool = False
    """Samples come from an iterable data set."""
    drops_last: bool = False
    unshuffled: bool = False
    with_replacement: bool = False
    some_only: bool = False
    """A sampler that is told how many samples to draw, or which."""
    dropped: tuple[int, ...] = ()
    """Ids that it names as left out."""
    batch_size: int | None = None
    workers: int = 0
    """Worker processes of the loader."""
    steps: int | None = None
    """Batches of an epoch, as ``len`` says."""


def declared_by(given: Any) -> Declared:
    """What can be known of a loader or sampler from its attributes."""
    parts = list(nested_loaders(given))
    samplers = [part for part in parts if not isinstance(part, DataLoader)]
    shuffles = [_attribute(part, "shuffle") for part in samplers if not _wraps_sampler(part)]
    subset = [part for part in samplers if isinstance(part, SubsetRandomSampler)]
    counted = [part for part in samplers if chosen_sample_count(part) is not None]
    size = max((len(set(part.indices)) for part in subset), default=None) or _size(parts)
    dropped = [part.dropped for part in parts if isinstance(getattr(part, "dropped", None), np.ndarray)]
    return Declared(
        size=size,
        lengths=_lengths(parts, size),
        streamed=any(isinstance(_attribute(part, "dataset"), IterableDataset) for part in parts),
        drops_last=any(getattr(part, name, None) is True for part in parts for name in ("drop_last", "_drop_last")),
        unshuffled=any(given is False for given in shuffles) and not any(given is True for given in shuffles),
        with_replacement=any(getattr(part, "replacement", None) is True for part in samplers),
        some_only=bool(subset)
        or any(isinstance(part, RandomSampler) for part in counted)
        or any(map(_draws_fewer, samplers)),
        dropped=tuple(int(index) for ids in dropped for index in ids),
        batch_size=next((part.batch_size for part in parts if type(_attribute(part, "batch_size")) is int), None),
        workers=max((part.num_workers for part in parts if isinstance(part, DataLoader)), default=0),
        steps=_len(given),
    )


def _draws_fewer(sampler: Any) -> bool:
    """A weighted sampler that was told to draw fewer samples than it has weights."""
    return isinstance(sampler, WeightedRandomSampler) and sampler.num_samples < len(sampler.weights)


def nested_loaders(given: Any) -> Iterator[Any]:
    """The loader or sampler, and the loaders and samplers inside it, outermost first."""
    seen: set[int] = set()
    queue = [given]
    while queue and len(seen) < 50:
        part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        inner = [_attribute(part, name) for name in _INNER]
        inner += [value for value in _values(part) if isinstance(value, (Sampler, DataLoader))]
        inner += [_attribute(_attribute(part, name), "_sampler") for name in _DATA]
        inner += [value for value in (_attribute(part, name) for name in _DATA) if isinstance(value, Sampler)]
        queue += [value for value in inner if value is not None]


def set_epoch(given: Any, epoch: int) -> None:
    """Calls ``set_epoch`` on what was given, its sampler, batch sampler and iterable data set, where it is defined.

    Of a sampler only what a trainer reaches through the loader that is made of it: itself, and its sampler.
    """
    called: list[Any] = []
    part: Any
    batch_sampler = None if isinstance(given, Sampler) else _attribute(given, "batch_sampler")
    dataset = _attribute(given, "dataset")
    samplers = (_attribute(given, "sampler"), _attribute(given, "data_sampler"), _attribute(batch_sampler, "sampler"))
    iterable = dataset if isinstance(dataset, IterableDataset) else None
    for part in (given, *samplers, batch_sampler, iterable):
        if any(part is other for other in called) or not callable(getattr(part, "set_epoch", None)):
            continue
        called.append(part)
        part.set_epoch(epoch)


def map_style_loader(given: Any) -> Any:
    """The DataLoader of a map-style data set in what was given; None where there is none."""
    for part in nested_loaders(given):
        if isinstance(part, DataLoader) and not isinstance(part.dataset, IterableDataset):
            return part
    return None


def _wraps_sampler(part: Any) -> bool:
    """A sampler over what another sampler draws, as Lightning makes them."""
    return _attribute(_attribute(part, "dataset"), "_sampler") is not None


def _size(parts: list[Any]) -> int | None:
    sizes = []
    for part in parts:
        if isinstance(part, DataLoader):
            sizes.append(None if isinstance(part.dataset, IterableDataset) else _len(part.dataset))
        elif not _wraps_sampler(part):
            held = (_attribute(part, name) for name in (*_DATA, *_LENGTHS))
            sizes += [_len(value) for value in held if not isinstance(value, (str, bytes, Sampler))]
    return max((size for size in sizes if size), default=None)


def _lengths(parts: list[Any], size: int | None) -> np.ndarray | None:
    holders = [*parts, *(_attribute(part, name) for part in parts for name in _DATA)]
    for name in _LENGTHS:
        for holder in holders:
            values = _attribute(holder, name)
            if values is not None and size and _len(values) == size:
                try:
                    array = np.asarray(values, dtype=np.float64)
                except (TypeError, ValueError):
                    continue
                if array.ndim == 1:
                    return array
    for name in _LENGTH_CALLS:
        for holder in holders:
            call = _attribute(holder, name)
            if callable(call) and size and size <= 1_000_000 and (lengths := _called(call, size)) is not None:
                return lengths
    return None


def _called(call: Callable[[int], Any], size: int) -> np.ndarray | None:
    try:
        lengths = np.array([float(call(index)) for index in range(size)])
    except Exception:
        return None
    return lengths if len(lengths) == size else None


def _attribute(part: Any, name: str) -> Any:
    if type(part) in (type(None), str, bytes, int, float, list, tuple, dict, np.ndarray):
        return None
    try:
        return getattr(part, name, None)
    except Exception:
        return None


def _values(part: Any) -> list[Any]:
    try:
        return list(vars(part).values())
    except TypeError:
        return []


def _len(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:
        return None
