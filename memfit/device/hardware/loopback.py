"""The loopback interface of this machine, and what makes gloo and NCCL listen there alone."""

from __future__ import annotations

import ipaddress
import os

import psutil

LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def loopback_interface() -> str | None:
    """The name of the interface with the loopback address; None where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, leads to this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_environment() -> dict[str, str]:
    """Environment variables that make gloo and NCCL of one node listen on loopback; an interface that the user set
    stays."""
    name = loopback_interface()
    return {} if name is None else {key: name for key in _INTERFACES if key not in os.environ}
