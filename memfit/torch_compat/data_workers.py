"""torch's private names for the worker processes of a DataLoader."""

from __future__ import annotations

from memfit.torch_compat.versions import lacks

try:
    from torch.utils.data._utils import worker as worker_module
    from torch.utils.data._utils.worker import WorkerInfo
    from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

    worker_module._worker_info  # noqa: B018
except (AttributeError, ImportError) as error:
    raise lacks(error) from error

__all__ = ["DataLoaderIterator", "WorkerInfo", "worker_module"]
