"""Engines whose ranks all take samples of their own."""

from __future__ import annotations

from collections.abc import Sequence
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

    def divide_sequences(self, job: Job, nets: Nets, batches: Sequence[Any]) -> AbstractContextManager[list[Any]]:
        """The batches, with whole sequences."""
        return nullcontext(list(batches))

    @property
    def data_world(self) -> int:
        """As many as there are ranks."""
        return self.world
