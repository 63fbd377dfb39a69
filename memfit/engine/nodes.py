"""The machines of a run."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.device.hardware.loopback import LOOPBACK


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a run, and this one's place among them."""

    count: int = 1
    rank: int = 0
    host: str = LOOPBACK
    """The address of the node of rank 0."""
    port: int = 0
    """The port on which that node serves the store; 0: a free one, which one node alone may take."""

    def __str__(self) -> str:
        return f"node {self.rank} of {self.count} at {self.host}:{self.port}"
