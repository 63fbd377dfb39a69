"""Loaders that give indices in place of data: what is drawn is seen, and nothing is read.

While ``indices_only`` holds, every torch DataLoader (and what builds on it: StatefulDataLoader, Accelerate's and
Lightning's loaders) gives the indices that its sampler draws. An iterable data set has none: it is read, worker by
worker in this process, in the order in which its workers would have delivered it.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.audit.ids import _scalar, sample_of
from memfit.device.hardware.process_limits import check_simulated_workers
from memfit.torch_compat.data_workers import (
    GET_ITERATOR,
    DataLoaderIterator,
    WorkerInfo,
    in_worker,
    index_sampler,
)


@contextlib.contextmanager
def indices_only() -> Iterator[None]:
    """Loaders give indices; with an iterable data set, the ids of its samples."""
    stateful = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    classes = [DataLoader, *([stateful.StatefulDataLoader] if stateful else [])]
    with contextlib.ExitStack() as stack:
        for loader_class in classes:
            stack.enter_context(mock.patch.object(loader_class, GET_ITERATOR, _get_iterator))
        yield


class Watch:
    """Which loader a loop took its last batch from, and when loaders began."""

    def __init__(self) -> None:
        self.current: Any = None
        self.begun: list[tuple[Any, int]] = []
        self.now: Callable[[], int] = int


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Keeps watch over every DataLoader that is iterated."""
    watch, loader_of = Watch(), {}
    begin, go_on = DataLoader.__iter__, DataLoaderIterator.__next__

    def begin_watched(loader: Any) -> Any:
        watch.begun.append((loader, watch.now()))
        iterator = begin(loader)
        loader_of[id(iterator)] = iterator, loader
        return iterator

    def go_on_watched(iterator: Any) -> Any:
        watch.current = loader_of.get(id(iterator), (None, None))[1]
        return go_on(iterator)

    with (
        mock.patch.object(DataLoader, "__iter__", begin_watched),
        mock.patch.object(DataLoaderIterator, "__next__", go_on_watched),
    ):
        yield watch


def _get_iterator(loader: Any) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return _LoaderIterator(loader, lambda: _samples(loader))
    return _LoaderIterator(loader, lambda: (_as_tensor(index) for index in index_sampler(loader)))


class _LoaderIterator:
    """The part of a loader's iterator that its ``__iter__`` uses."""

    _finished = False

    def __init__(self, loader: Any, given: Callable[[], Iterator[Any]]) -> None:
        self.given = given
        self.items = given()

    def __iter__(self) -> _LoaderIterator:
        return self

    def __next__(self) -> Any:
        return next(self.items)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.items = self.given()

    def state_dict(self) -> dict[str, Any]:
        return {}


def _as_tensor(index: Any) -> Any:
    """Whole numbers as a tensor, which libraries move and slice as they do data; anything else unchanged."""
    if isinstance(index, list) and index and _scalar(index[0]) is not None:
        numbers = np.asarray(index)
        if numbers.ndim == 1 and numbers.dtype.kind in "iu":
            return torch.from_numpy(numbers.astype(np.int64, copy=False))
    return index


def _samples(loader: Any) -> Iterator[Any]:
    """Batches of ids of an iterable data set, of its workers in turn."""
    check_simulated_workers(loader.num_workers)
    workers = [_worker(loader, number) for number in range(loader.num_workers)] or [_batches(loader, loader.dataset)]
    while workers:
        for worker in list(workers):
            try:
                yield next(worker)
            except StopIteration:
                workers.remove(worker)


def _worker(loader: Any, number: int) -> Iterator[Any]:
    try:
        dataset = copy.deepcopy(loader.dataset)
    except Exception:
        dataset = loader.dataset
    info = WorkerInfo(id=number, num_workers=loader.num_workers, seed=number, dataset=dataset)

    with in_worker(info):
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(number)
        batches = _batches(loader, dataset)
    while True:
        with in_worker(info):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _batches(loader: Any, dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, "sampler") and hasattr(dataset, "dataset"):
        dataset = copy.copy(dataset)
        dataset.dataset = _Echo()
    if loader.batch_size is None:
        yield from dataset
        return
    batch: list[Any] = []
    for sample in dataset:
        batch.append(sample_of(sample))
        if len(batch) == loader.batch_size:
            yield _as_tensor(batch)
            batch = []
    if batch and not loader.drop_last:
        yield _as_tensor(batch)


class _Echo:
    """Stands for a data set inside an iterable wrapper with a sampler (Lhotse's): gives back what it is asked for."""

    def __getitem__(self, index: Any) -> Any:
        return index
