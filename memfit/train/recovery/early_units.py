"""Makes a window's micro-batches again where memory runs out while their units are counted.

A job whose ``units(batch)`` counts before the forward has all micro-batches of a window collated before the first one
is trained. Memory that runs out there is recovered as in a forward: once more as it was, then with one batch in memory
at a time, which is collated again for its forward, then with smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.apply.losses import MicroBatch
from memfit.train.launch import memory_limit
from memfit.train.recovery.failure import Failure, Ids

Make = Callable[[Ids, bool], MicroBatch]
"""Makes a micro-batch of samples; the flag says whether a batch that is collated for its units is kept."""
KEPT_TRIES = 2
"""Tries in which the batches are kept for their forward."""


def make_with_retries(
    parts: Sequence[Ids],
    make: Make,
    failed: Callable[[Exception, int, Ids], Failure],
    smaller: Callable[[Sequence[Ids], Failure], Sequence[Ids]],
    kept_tries: int = KEPT_TRIES,
) -> list[MicroBatch]:
    """The micro-batches of a window.

    Args:
        parts: the samples of each.
        failed: takes note of a memory failure in the micro-batch with this number and these samples.
        smaller: the parts with the failed one cut; raises where it cannot be.
        kept_tries: failures after which the batches are not kept, and the parts become smaller.
    """
    tries = 0
    while True:
        made: list[MicroBatch] = []
        try:
            for ids in parts:
                made.append(make(ids, tries < kept_tries))
            return made
        except Exception as error:
            if not memory_limit.is_memory_failure(error):
                raise
            number = len(made)
            made.clear()
            failure = failed(error, number, parts[number])
        tries += 1
        if tries > kept_tries:
            parts = smaller(parts, failure)
