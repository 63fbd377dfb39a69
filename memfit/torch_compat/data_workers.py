"""torch's private names for the worker processes of a DataLoader."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memfit.torch_compat.versions import lacks

try:
    from torch.utils.data._utils import signal_handling
    from torch.utils.data._utils import worker as worker_module
    from torch.utils.data._utils.worker import WorkerInfo
    from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

    worker_module._worker_info  # noqa: B018
    signal_handling._SIGCHLD_handler_set  # noqa: B018
except (AttributeError, ImportError) as error:
    raise lacks(error) from error


def hide_worker_info() -> None:
    """In a worker: ``get_worker_info()`` gives None, as in a process without workers.

    A data set that deals out its samples by worker then gives all of them, and ``default_collate`` makes no tensor in
    /dev/shm.
    """
    worker_module._worker_info = None


@contextmanager
def no_error_on_child_exit() -> Iterator[None]:
    """Workers that are started inside do not raise in the main thread, wherever it is, when one of them ends."""
    before, was_set = signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = was_set


def workers_of(iterator: Any) -> list[Any]:
    """The processes of a DataLoader's iterator."""
    return list(iterator._workers)


def shut_down(iterator: Any) -> None:
    """Ends the processes and the thread of a DataLoader's iterator."""
    iterator._shutdown_workers()


__all__ = [
    "DataLoaderIterator", "WorkerInfo", "hide_worker_info", "no_error_on_child_exit", "shut_down", "worker_module",
    "workers_of",
]  # fmt: skip
