"""A torchrun rendezvous whose nodes are known: a store on the address that was asked for, or on loopback for one node.

torchrun's own one (c10d) opens two stores on every interface, and unpickles what anyone writes to one of them. Here the
first node serves one store on one address, and what nodes write to it is text.

A node that is lost and started again with the same rank joins the next round, which begins when the ranks of the others
have ended with their broken connections.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from memfit.engine.listen_address import open_store
from memfit.engine.nodes import Nodes

BACKEND = "memfit-nodes"
NODE_SECONDS = 900.0
"""Seconds that nodes wait for one that is not there, at the start and after one was lost."""
_TIMEOUT = timedelta(seconds=300)
_LOOKS_EVERY = 0.2
_SAYS_AFTER = 5.0
"""Seconds after which node 0 says for which nodes it waits."""
_ROUND = "round"
_meetings: dict[str, Meeting] = {}


class Meeting:
    """The store on which a run's nodes meet, and the rounds in which they start their ranks.

    Args:
        is_over: whether the run has ended, so that no round is waited for.
        is_stopped: whether this process has been sent a signal to stop.
        is_separate: whether this node's folder is not the first node's.

    Raises:
        RendezvousTimeoutError: a node was not there in ``NODE_SECONDS``, naming it.
        RendezvousConnectionError: the node that serves the store is gone.
        RendezvousClosedError: the run has ended.
    """

    def __init__(
        self,
        nodes: Nodes,
        run_id: str,
        store: dist.TCPStore,
        is_over: Callable[[], bool],
        is_stopped: Callable[[], bool] = lambda: False,
        *,
        is_separate: bool = False,
    ) -> None:
        self.nodes, self.run_id, self.store = nodes, run_id, store
        self.is_separate = is_separate
        self._is_over, self._is_stopped = is_over, is_stopped
        self._last = 0
        _meetings[run_id] = self

    @property
    def has_begun(self) -> bool:
        """Whether every node has been in a round of this run: one that joins now was lost before."""
        return bool(self.store.check([_complete(1)]))

    def next_round(self) -> int:
        """Waits until every node asks for the same round; gives its number, from 1."""
        until = time.monotonic() + NODE_SECONDS
        try:
            number = self._call(until) if self.nodes.rank == 0 else self._answer(until)
        except (RendezvousTimeoutError, RendezvousClosedError):
            raise
        except RuntimeError as error:  # torch raises its DistError, which is one
            why = f"node 0 at {self.nodes.host}:{self.nodes.port} is gone"
            raise RendezvousConnectionError(why) from error
        self._last = number
        return number

    def _call(self, until: float) -> int:
        """On node 0: begins a round and waits for the others."""
        number = int(self.store.add(_ROUND, 1))
        says_at: float | None = time.monotonic() + _SAYS_AFTER
        for other in range(1, self.nodes.count):
            while not self.store.check([_joined(number, other)]):
                if says_at is not None and time.monotonic() > says_at:
                    says_at = None
                    self._say_missing(number)
                self._wait(until, f"node {other}")
        self.store.set(_complete(number), "1")
        return number

    def _say_missing(self, number: int) -> None:
        others = range(1, self.nodes.count)
        missing = sum(not self.store.check([_joined(number, other)]) for other in others)
        where = f"{self.nodes.host}:{self.nodes.port}"
        print(f"memfit: waiting at {where} for {missing} of {len(others)} other nodes", file=sys.stderr, flush=True)

    def _answer(self, until: float) -> int:
        """On another node: joins the newest round that it has not joined, until one is complete."""
        while True:
            number = int(self.store.add(_ROUND, 0)) if self.store.check([_ROUND]) else 0
            own = _joined(number, self.nodes.rank)
            if number > self._last and not self.store.check([own]):
                self.store.set(own, "1")
                while int(self.store.add(_ROUND, 0)) == number:
                    if self.store.check([_complete(number)]):
                        return number
                    self._wait(until, "another node")
            self._wait(until, "node 0")

    def _wait(self, until: float, who: str) -> None:
        if self._is_over():
            raise RendezvousClosedError("the run has ended")
        if self._is_stopped():
            raise RendezvousClosedError(f"a signal to stop came while {who} was waited for")
        if time.monotonic() > until:
            raise RendezvousTimeoutError(f"{who} was not there in {NODE_SECONDS:g} s")
        time.sleep(_LOOKS_EVERY)


def _joined(number: int, node: int) -> str:
    return f"{number}/node{node}"


def _complete(number: int) -> str:
    return f"{number}/complete"


class NodeRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun agent, again after each restart of its ranks."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet on this store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """All nodes, on a part of the store that no earlier start has written to."""
        meeting = self._meeting
        store = dist.PrefixStore(f"{meeting.run_id}/{meeting.next_round()}", meeting.store)
        address = RendezvousStoreInfo(meeting.nodes.host, meeting.store.port)
        return RendezvousInfo(store, meeting.nodes.rank, meeting.nodes.count, address)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._meeting.run_id

    def shutdown(self) -> bool:
        """Closes the store."""
        self._closed = True
        _meetings.pop(self._meeting.run_id, None)
        return True


def serve(
    nodes: Nodes,
    run_id: str,
    is_over: Callable[[], bool] = lambda: False,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Meeting:
    """Opens the store of a run, on the node of rank 0.

    Args:
        is_over: see ``Meeting``.
        is_stopped: see ``Meeting``.

    Raises:
        OSError: the address and port cannot be listened on.
    """
    return Meeting(nodes, run_id, open_store(nodes.host, _TIMEOUT, nodes.port), is_over, is_stopped)


def register_rendezvous() -> None:
    """Makes ``--rdzv-backend memfit-nodes`` known to torchrun in this process."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return NodeRendezvous(_meetings[parameters.run_id])
