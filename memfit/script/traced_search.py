"""The largest batch of which each size is traced, where the bytes of one size do not follow from those of others."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST_FACTOR = 16
"""By how much the next size is larger at most: the slope at small sizes is that of rounded blocks."""


@dataclass
class TracedNeeds:
    """What traced sizes need.

    Attributes:
        usable_bytes: what the card has.
        process_bytes: by size.
        fits: by size.
    """

    usable_bytes: int
    process_bytes: dict[int, int] = field(default_factory=dict)
    fits: dict[int, bool] = field(default_factory=dict)

    @property
    def too_large(self) -> int:
        """The smallest size that does not fit; 0 where all do."""
        return min((size for size, fits in self.fits.items() if not fits), default=0)

    @property
    def fitting(self) -> int:
        """The largest size below that one; 0 where none is."""
        most = self.too_large
        return max((size for size in self.fits if not most or size < most), default=0)


def next_size(needs: TracedNeeds, most: int) -> int:
    """The size to trace next; 0 where the largest that fits is known, or where ``most`` fits."""
    fitting, too_large = needs.fitting, needs.too_large
    if not fitting:
        return too_large // 2
    if not too_large:
        return 0 if fitting >= most else min(max(_estimated(needs), fitting + 1), fitting * _MOST_FACTOR, most)
    if too_large - fitting <= 1:
        return 0
    if len(needs.process_bytes) % 2:  # an estimate may come nearer by one size a time
        return (fitting + too_large) // 2
    return min(max(_estimated(needs), fitting + 1), too_large - 1)


def _estimated(needs: TracedNeeds) -> int:
    """The largest size that fits, on the line through the two traced sizes beside it."""
    known = sorted(needs.process_bytes)
    low, high = (needs.fitting, needs.too_large) if needs.too_large else (known[0], known[-1])
    if not needs.too_large and len(known) > 1:
        low = known[-2]
    grown = needs.process_bytes[high] - needs.process_bytes[low]
    if grown <= 0:
        return high * _MOST_FACTOR
    return low + (needs.usable_bytes - needs.process_bytes[low]) * (high - low) // grown
