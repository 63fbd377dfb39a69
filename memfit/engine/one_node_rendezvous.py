"""A torchrun rendezvous for ranks of one node: a store on loopback, and nothing to agree on with other nodes.

torchrun's own one (c10d) opens two stores on every interface, and unpickles what anyone writes to one of them.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from memfit.device.hardware.loopback import LOOPBACK
from memfit.engine.listen_address import open_store

BACKEND = "memfit-one-node"
_TIMEOUT = timedelta(seconds=300)


class OneNodeRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun agent, again after each restart of its ranks."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: dist.TCPStore | None = None
        self._rounds = 0
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet on this store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """One node of one, on a part of the store that no earlier start has written to."""
        if self._store is None:
            self._store = open_store(LOOPBACK, _TIMEOUT)
        self._rounds += 1
        store = dist.PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Closes the store."""
        self._closed, self._store = True, None
        return True


def register() -> None:
    """Makes ``--rdzv-backend memfit-one-node`` known to torchrun in this process."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneNodeRendezvous(parameters.run_id)
