"""Ranges of micro-batches in which a kind of step follows from two traced ones, found with few traces.

Between two sizes that make the same events, the bytes of every storage lie on the line through both if sizes in between
lie on it, too; otherwise the interval is parted. Where two sizes make other events, halving finds where one step ends
and the other begins; what is left between them after ``TRACES`` is not derived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from memfit.events import FAILED, Trace
from memfit.planner.step_range import StepRange, divide_unlike, is_on, range_between, same_events, size_between

TRACES = 20
"""Traces of one kind of step, at most; so many find one change of the step among 2,000 sizes, or two among 100."""


def derived_ranges(trace_at: Callable[[int], Trace | str], most: int, changes: Sequence[int] = ()) -> list[StepRange]:
    """The ranges of items, ascending, in which a step follows from two traced ones.

    Args:
        trace_at: the step at so many items, or why there is none.
        most: the largest size.
        changes: sizes from which on another step is likely, as ``changes_of`` gives them of a like kind of step.
    """
    traces = _TracesBySize(trace_at)
    ranges = _alone(1, traces.at(1))
    open_ends = deque([(2, most)])
    while open_ends:
        low, high = open_ends.popleft()
        line = range_between(low, traces.at(low), high, traces.at(high))
        middle = size_between(low, high)
        if middle in (low, high):
            ranges += [line] if line is not None else [*_alone(low, traces.at(low)), *_alone(high, traces.at(high))]
            continue
        between = traces.between(low, high)
        if line is not None and not traces.are_enough and not (between and divide_unlike((low, *between, high))):
            between.append(middle)
        off = [size for size in between if line is not None and not is_on(line, size, traces.at(size))]
        if line is not None and between and not off and divide_unlike((low, *between, high)):
            ranges.append(line)
        elif traces.are_enough:
            ranges += [*_alone(low, traces.at(low)), *_alone(high, traces.at(high))]
        elif off:
            open_ends += [(low, off[0]), (off[0], high)]
        else:
            open_ends += traces.parted(low, high, changes)
    return _joined(_without_repeats(ranges), traces)


def changes_of(ranges: Sequence[StepRange]) -> tuple[int, ...]:
    """The sizes from which on another step is made, from 3 on."""
    return tuple(after.low for before, after in pairwise(ranges) if after.low == before.high + 1 and after.low > 2)


class _TracesBySize:
    """What was traced of one kind of step.

    Args:
        trace_at: as of ``derived_ranges``.
    """

    def __init__(self, trace_at: Callable[[int], Trace | str]) -> None:
        self._trace_at = trace_at
        self._known: dict[int, Trace | None] = {}

    @property
    def are_enough(self) -> bool:
        """Whether no further size is traced for a range's sake."""
        return len(self._known) >= TRACES

    def at(self, items: int) -> Trace | None:
        """The step; None where there is none, or it failed."""
        if items not in self._known:
            traced = self._trace_at(items)
            usable = not isinstance(traced, str) and all(name != FAILED for name, _, _ in traced.phases)
            self._known[items] = traced if usable else None  # type: ignore[assignment]
        return self._known[items]

    def between(self, low: int, high: int) -> list[int]:
        """Sizes between two that were traced."""
        return [size for size in self._known if low < size < high]

    def parted(self, low: int, high: int, changes: Sequence[int]) -> list[tuple[int, int]]:
        """Parts of the sizes from ``low`` to ``high``, whose steps differ: the step of ``low`` ends, and that of
        ``high`` begins, at one of ``changes`` or where halving leads, unless there is another step between the two."""
        for size in changes:
            if low < size <= high and not self._are_alike(size - 1, size):
                return [(low, size - 1), (size, high)]
        between = sorted(self.between(low, high))
        last = max((size for size in between if self._are_alike(low, size)), default=low)
        other = min((size for size in between if size > last and self._are_alike(size, high)), default=high)
        while last < (middle := _halfway(last, other)) < other and not self.are_enough:
            if self._are_alike(low, middle):
                last = middle
            elif self._are_alike(middle, high):
                other = middle
            else:
                return [(low, last), (last, middle), (middle, other), (other, high)]
        return [(low, last), (other, high)]

    def _are_alike(self, low: int, high: int) -> bool:
        first, last = self.at(low), self.at(high)
        if first is None or last is None:
            return first is last
        return same_events(first, last)


def _halfway(low: int, high: int) -> int:
    """Halfway between two sizes; as many times the lower as the higher is of it where they lie far apart."""
    return math.isqrt(low * high) if high > 2 * low else (low + high) // 2


def _alone(items: int, trace: Trace | None) -> list[StepRange]:
    """The range of one traced size."""
    line = range_between(items, trace, items, trace)
    return [] if line is None else [line]


def _joined(ranges: Sequence[StepRange], traces: _TracesBySize) -> list[StepRange]:
    """The ranges, of which two that lie on one line are one."""
    joined: list[StepRange] = []
    for item in ranges:
        last = joined[-1] if joined else item
        line = None
        if last.high == item.low and last.low < last.high < item.high:
            line = range_between(last.low, last.trace, item.high, traces.at(item.high))
        if line is not None and is_on(line, last.high, traces.at(last.high)):
            joined[-1] = line
        else:
            joined.append(item)
    return joined


def _without_repeats(ranges: list[StepRange]) -> list[StepRange]:
    """The ranges, ascending, without single sizes that are the end of another."""
    wide = [item for item in ranges if item.low < item.high]
    ends = {end for item in wide for end in (item.low, item.high)}
    single = {item.low: item for item in ranges if item.low == item.high and item.low not in ends}
    return sorted([*wide, *single.values()], key=lambda item: item.low)
