"""Engines whose ranks all take samples of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from memfit.job import Job, Nets


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
    def context_ranks(self) -> int:
        """A rank has whole sequences."""
        return 1

    def divide_sequences(self, job: Job, nets: Nets, batch: Any) -> AbstractContextManager[Any]:
        """The batch, with whole sequences."""
        return nullcontext(batch)

    @property
    def data_world(self) -> int:
        """As many as there are ranks."""
        return self.world
