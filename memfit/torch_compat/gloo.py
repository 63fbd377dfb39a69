"""gloo's process groups with a single worker thread each.

torch gives a group two workers for each network interface. All of them write the name of the operation that they
completed into one string, without a lock (``ProcessGroupGloo::runLoop``): where two collectives of a group end at the
same moment, one worker frees the memory that the other writes to, and the rank dies of a corrupted heap (seen with an
all-gather and an all-to-all in flight, torch 2.13). Collectives of a group have the same order on all ranks, so that a
single worker waits for nothing that stands behind it.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from memfit.torch_compat.versions import lacks

try:
    import torch.distributed.distributed_c10d as distributed_c10d
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    _Options: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

_INTERFACES = "GLOO_SOCKET_IFNAME"
"""The environment variable of the interfaces that torch gives gloo, with commas between."""


class _OneWorkerGloo(ProcessGroupGloo):
    """What torch makes where it is asked for a group of gloo's."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **choices: Any) -> None:
        options = _Options()
        for name, value in choices.items():  # enable_reconfigure, since torch 2.14
            setattr(options, name, value)
        names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
        devices = [ProcessGroupGloo.create_device(interface=name) for name in names]
        options._devices = devices or [ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def give_gloo_one_worker() -> None:
    """Has every group of gloo's that this process makes from now on complete one collective after the other."""
    distributed_c10d.ProcessGroupGloo = _OneWorkerGloo  # type: ignore[misc]
