"""torch's private names for the worker processes of a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memfit.torch_compat.versions import lacks

try:
    from torch.utils.data._utils import signal_handling
    from torch.utils.data._utils import worker as worker_module
    from torch.utils.data._utils.worker import WorkerInfo
    from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

    worker_module._worker_info  # noqa: B018
    signal_handling._remove_worker_pids  # noqa: B018
except (AttributeError, ImportError) as error:
    raise lacks(error) from error


GET_ITERATOR, WORKER_INFO = "_get_iterator", "_worker_info"
"""For patches: of DataLoader, and of ``worker_module``."""


def chosen_sample_count(sampler: Any) -> int | None:
    """The number of samples that a RandomSampler was given; None where it draws each once, and of other samplers."""
    count: int | None = getattr(sampler, "_num_samples", None)
    return count


def index_sampler(loader: Any) -> Any:
    """What a DataLoader takes its indices from: its batch sampler, or its sampler where it makes no batches."""
    return loader._index_sampler


def replace_indices(iterator: Any, change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Replaces what a DataLoader's iterator takes its next indices from by what ``change`` makes of it."""
    if isinstance(iterator, DataLoaderIterator):
        iterator._sampler_iter = change(iterator._sampler_iter)


@contextmanager
def in_worker(info: Any) -> Iterator[None]:
    """Context in which ``get_worker_info()`` gives ``info``."""
    before, worker_module._worker_info = worker_module._worker_info, info
    try:
        yield
    finally:
        worker_module._worker_info = before


def hide_worker_info() -> None:
    """In a worker: ``get_worker_info()`` gives None, as in a process without workers.

    A data set that deals out its samples by worker then gives all of them, and ``default_collate`` makes no tensor in
    /dev/shm.
    """
    worker_module._worker_info = None


def leave_unwatched(iterator: Any) -> None:
    """Workers of this DataLoader's iterator do not raise in the main thread, wherever it is, when one of them ends.

    torch's handler of SIGCHLD, which any DataLoader sets, looks at the processes that it was told of. That a worker has
    ended is seen when its batch is asked for.
    """
    if iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def workers_of(iterator: Any) -> list[Any]:
    """The processes of a DataLoader's iterator; none of one that reads in this process."""
    return list(getattr(iterator, "_workers", ()))


def data_set_of(iterator: Any) -> Any:
    """The data set that a DataLoader's iterator reads."""
    return iterator._dataset


def shut_down(iterator: Any) -> None:
    """Ends the processes and the thread of a DataLoader's iterator."""
    iterator._shutdown_workers()


__all__ = [
    "GET_ITERATOR", "WORKER_INFO", "DataLoaderIterator", "WorkerInfo", "chosen_sample_count", "data_set_of",
    "hide_worker_info", "in_worker", "index_sampler", "leave_unwatched", "replace_indices", "shut_down",
    "worker_module", "workers_of",
]  # fmt: skip
