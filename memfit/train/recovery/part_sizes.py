"""PartSizes: how large a micro-batch may be now. Failures make it smaller, and windows without one let it grow back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.train.recovery.failure import Ids
from memfit.train.recovery.reduced_limits import ReducedLimits

GROW_AFTER = 16
"""Windows without a failure after which micro-batches are tried twice as large; doubled by each failure to grow."""
LONGEST_WAIT = 1024


class PartSizes:
    """The size of micro-batches over a run.

    Args:
        cost: padded units of these samples together.
        largest: padded units of the plan's largest micro-batch.
        least: the fewest samples of a micro-batch that the nets can learn from.
        limits: what is smaller from the start.
        grows: whether micro-batches grow back.
    """

    def __init__(
        self, cost: Callable[[Ids], int], largest: int, *, least: int, limits: ReducedLimits, grows: bool
    ) -> None:
        self.cap = limits.most
        """Most padded units of a micro-batch; None: as planned."""
        self.growing = False
        """Whether the size has just grown, and no window has shown yet that it fits."""
        self.left_out = frozenset(limits.left_out)
        """Samples that do not fit alone."""
        self._cost, self._largest, self._least, self._grows = cost, largest, least, grows
        self._quiet, self._wait = 0, GROW_AFTER

    def parts_of(self, planned: Sequence[Ids]) -> list[Ids]:
        """A window's micro-batches, cut to the size that fits now, without the samples that are left out."""
        if self.left_out:
            planned = [kept for ids in planned if (kept := tuple(i for i in ids if i not in self.left_out))]
        if self.cap is None:
            return list(planned)
        return [part for ids in planned for part in self.cut(ids, self.cap)]

    def cut(self, ids: Ids, most: int) -> list[Ids]:
        """Neighbours together, each part of at most this padded cost, or as few samples as the nets can learn from."""
        parts: list[Ids] = []
        for sample in ids:
            if parts and (len(parts[-1]) < self._least or self._cost((*parts[-1], sample)) <= most):
                parts[-1] = (*parts[-1], sample)
            else:
                parts.append((sample,))
        if len(parts) > 1 and len(parts[-1]) < self._least:
            last = parts.pop()
            parts[-1] += last
        return parts

    def half(self, ids: Ids) -> int | None:
        """What half of these samples cost; None: they cannot be cut."""
        return None if len(ids) < 2 * self._least else max(self._cost(ids) // 2, 1)

    def at_most(self, most: int) -> int:
        """The smaller of this cost and what a micro-batch may cost now."""
        return min(self.cap or self._largest, most)

    def halved(self) -> int:
        """Half of what a micro-batch may cost now."""
        return max((self.cap or self._largest) // 2, 1)

    def failed(self) -> None:
        """Memory ran out: the windows without a failure are counted anew."""
        self._quiet = 0

    def growth_failed(self) -> None:
        """Memory ran out in a window that was to show that a larger size fits: the next growth waits twice as long."""
        if self.growing:
            self._wait, self.growing = min(self._wait * 2, LONGEST_WAIT), False

    def window_fitted(self, *, thrashed: bool) -> None:
        """A window ended without a failure. After many of those micro-batches grow.

        Args:
            thrashed: whether the allocator had to give its cache back, after which they shrink.
        """
        self.growing = False
        if thrashed:
            self.cap, self._quiet = self.halved(), 0
            return
        self._quiet += 1
        if self.cap is not None and self._grows and self._quiet >= self._wait:
            self.cap, self._quiet, self.growing = self.cap * 2, 0, True
            if self.cap >= self._largest:
                self.cap = None
