"""Memory for the batches that a run's workers read before their window, as a plan prices and bounds it: host memory,
pinned where a card is trained, and what copies of them take of the card."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.device.hardware.catalogue import Device
from memfit.footprint import Footprint
from memfit.sizes import format_size

BATCHES = 18
"""Batches that wait at most where memory allows it: two of each of 8 workers, and two of the window at hand."""
LEAST_BATCHES = 3
"""Batches without which reading does not run beside training."""
MOST_BYTES = 4 << 30
ON_CARD = 2
"""Batches in the pool of the copies' stream: the one at hand and the one that is copied."""
LARGEST_SMALL = 1 << 20
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
"""Segments of the caching allocator (torch 2.13.0, c10/core/CachingDeviceAllocator.h) for requests of up to 1 MiB and
up to 10 MiB."""


@dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """The bound, and how it was reached."""

    nbytes: int | None
    """None: the footprint tells no bytes of a batch."""
    reason: str


def copy_ahead(footprint: Footprint, device: Device) -> ReadAhead:
    """What the copies of the batches take of a card where they have a stream of their own; 0 where it has no room.

    The caching allocator serves each stream from its own segments. Requests of at most half a segment fill it to more
    than half; larger ones have a segment of their size, rounded up to 2 MiB. So a pool takes at most twice its tensors'
    bytes and one segment of each kind. What the phase itself holds of its batch stays counted.
    """
    train = footprint.phases["train"]
    batch = train.categories.get("inputs", 0)
    if not batch or not device.is_cuda:
        return ReadAhead(nbytes=0, reason="")
    pool = 2 * ON_CARD * batch + SMALL_SEGMENT + (LARGE_SEGMENT if batch > LARGEST_SMALL else 0)
    most = max(max(phase.process_bytes, phase.process_bytes_high) for phase in footprint.phases.values())
    if most + pool > (device.usable_bytes or 0):
        why = f"0, since the card has no room for up to {format_size(pool)}: copies wait for what is computed before"
        return ReadAhead(nbytes=0, reason=why)
    reason = f"at most {format_size(pool)} of the card, beside the phases: workers' batches are copied on a stream of "
    return ReadAhead(nbytes=pool, reason=reason + "their own while the one before is computed")


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
