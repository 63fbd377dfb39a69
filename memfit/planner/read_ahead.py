"""Host memory for the batches that a run's workers read before their window, as a plan prices and bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.footprint import Footprint
from memfit.sizes import format_size

BATCHES = 18
"""Batches that wait at most where memory allows it: two of each of 8 workers, and two of the window at hand."""
LEAST_BATCHES = 3
"""Batches without which reading does not run beside training."""
MOST_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """The bound, and how it was reached."""

    nbytes: int | None
    """None: the footprint tells no bytes of a batch."""
    reason: str


def read_ahead(footprint: Footprint) -> ReadAhead:
    """The host memory of each rank for batches that were read before their window.

    It lies in memory that processes share: beside the budget of a CPU's run, and pinned where a card is trained.
    """
    batch = footprint.phases["train"].categories.get("inputs", 0)
    if not batch:
        return ReadAhead(nbytes=None, reason="")
    count = max(min(BATCHES, MOST_BYTES // batch), LEAST_BATCHES)
    reason = (
        f"up to {format_size(count * batch)} of host memory for each rank, beside the budget: {count} batches of "
        f"{format_size(batch)} that workers have read before their window"
    )
    return ReadAhead(nbytes=count * batch, reason=reason)
