"""Where ranks listen: on loopback, unless they run on several nodes, and then on the address that was asked for.

torch's TCPStore listens on every interface, and gloo on the one that the host's name leads to. Both take what others
send for ranks of this run, so neither is open to the network without need.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from memfit.device.hardware.loopback import LOOPBACK
from memfit.torch_compat.distributed import served_store


def is_one_node() -> bool:
    """Whether all ranks run on this machine, by the environment that torchrun sets."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return here == os.environ.get("WORLD_SIZE") if here else os.environ.get("MASTER_ADDR") in (LOOPBACK, "localhost")


def store_host() -> str:
    """The address on which rank 0 opens a store: loopback, or ``MASTER_ADDR`` where the ranks run on several nodes."""
    return LOOPBACK if is_one_node() else os.environ["MASTER_ADDR"]


def open_store(host: str, timeout: timedelta, port: int = 0) -> dist.TCPStore:
    """A store that this process serves at an address, on a port; 0: a free one.

    Where that is no address of this machine (a cluster's service, say), it listens on every interface.

    Raises:
        OSError: the port is taken.
    """
    listener = _listener(host, port)
    if listener is None:
        return dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)
    return served_store(host, listener, timeout)


def _listener(host: str, port: int = 0) -> socket.socket | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError:
        return None
    if port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise
        return None
    return listener
