"""torch's private names for the worker processes of a DataLoader."""

from __future__ import annotations

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
    """The processes of a DataLoader's iterator."""
    return list(iterator._workers)


def shut_down(iterator: Any) -> None:
    """Ends the processes and the thread of a DataLoader's iterator."""
    iterator._shutdown_workers()


__all__ = [
    "DataLoaderIterator", "WorkerInfo", "hide_worker_info", "leave_unwatched", "shut_down", "worker_module",
    "workers_of",
]  # fmt: skip
