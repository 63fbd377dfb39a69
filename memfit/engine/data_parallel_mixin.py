"""Engines whose ranks all take samples of their own."""

from __future__ import annotations


class DataParallelMixin:
    """Every rank has a share of the window."""

    rank: int
    world: int

    @property
    def data_rank(self) -> int:
        """The rank's own."""
        return self.rank

    @property
    def stages(self) -> int:
        """Every rank runs forwards whole."""
        return 1

    @property
    def data_world(self) -> int:
        """As many as there are ranks."""
        return self.world
