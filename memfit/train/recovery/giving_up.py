"""Memory ran out for good: what a run gives up with, on all ranks together."""

from __future__ import annotations

from memfit.engine.collectives import gather
from memfit.engine.protocol import Engine
from memfit.train.recovery.memory_growth import GrownMemoryError


class SampleTooLargeError(RuntimeError):
    """One sample alone does not fit: the run stops, and can be resumed with more memory."""


class NothingLeftError(RuntimeError):
    """Memory runs out whatever is trained: in a window without samples, or with one sample after another."""


GIVES_UP = (SampleTooLargeError, GrownMemoryError, NothingLeftError)
"""Memory ran out for good. Ranks that are not in lockstep raise it together."""


def give_up_together(engine: Engine, error: Exception | None) -> None:
    """Raises on all ranks what has made one of them give up; every rank calls it.

    Args:
        error: one of ``GIVES_UP``; None: this rank goes on.
    """
    own = None if error is None else (GIVES_UP.index(type(error)), f"rank {engine.rank}: {error}")
    for report in gather(engine, own):
        if report is not None:
            raise GIVES_UP[report[0]](report[1])
