"""Ranges of micro-batches whose steps make the same events: every storage's bytes lie on a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from memfit.events import FAILED, Trace
from memfit.trace.card_call_lines import Calls, are_calls_of, calls_between

EXACT = 1 << 53
"""Whole numbers below it are exact as JavaScript's doubles."""
ESTIMATES = 1e-6
"""Relative: how far floating point operations and traffic may lie off a line. Times, which they give, are estimates."""
NARROW = 16
"""Sizes so near to each other have their middle between them."""
AWAY = 16
"""How far from the middle a size may lie."""
PARTS = (2, 3, 4, 5, 7, 8, 16, 32, 64, 128)
"""Parts into which code of a job may divide a batch: halves of it, groups of 3, a multiple of 8."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRange:
    """Micro-batches of ``low`` to ``high`` items whose steps make the same events."""

    low: int
    high: int
    trace: Trace
    """The step at ``low``."""
    high_bytes: np.ndarray
    """int64 (S,): bytes of the storages at ``high``."""

    def bytes_at(self, items: int) -> np.ndarray | None:
        """int64 (S,): bytes of the storages at so many items; None where one is no whole number."""
        if self.low == self.high:
            return self.trace.nbytes
        products = (self.high_bytes - self.trace.nbytes) * (items - self.low)
        added, rest = np.divmod(products, self.high - self.low)
        return None if rest.any() else self.trace.nbytes + added


def range_between(
    low: int, first: Trace | None, high: int, last: Trace | None, *, exact: int = EXACT
) -> StepRange | None:
    """The range between two sizes; None where their steps differ by more than bytes, or reach beyond exact numbers.

    Args:
        exact: whole numbers below it are exact where the range is used.
    """
    if first is None or last is None or not same_events(first, last):
        return None
    largest = max(int(trace.nbytes.astype(object).sum()) for trace in (first, last))
    steepest = int(np.abs(last.nbytes - first.nbytes).max(initial=0))
    if 2 * largest >= exact or steepest * (high - low) >= exact:
        return None
    return StepRange(low=low, high=high, trace=first, high_bytes=last.nbytes)


def is_on(line: StepRange, items: int, trace: Trace | None) -> bool:
    """Whether a traced step lies in a range."""
    nbytes = line.bytes_at(items)
    return (
        trace is not None and nbytes is not None and same_events(line.trace, trace)
        and np.array_equal(nbytes, trace.nbytes)
    )  # fmt: skip


def same_events(first: Trace, other: Trace) -> bool:
    """Whether two steps differ in bytes alone, as far as an allocator sees them."""
    columns = ("kind", "storage", "category", "stream")
    return (
        first.phases == other.phases
        and first.net_kind == other.net_kind
        and all(np.array_equal(getattr(first, name), getattr(other, name)) for name in columns)
    )


def trace_between(known: Mapping[int, Trace], items: int) -> Trace | None:
    """The step of so many items from those of other sizes; None where it does not follow.

    It follows between two sizes if a third one in between lies on the line through both, and all three run the same
    operators: bytes to the byte, floating point operations and traffic as near as times need. Where all three divide
    alike (even numbers, say), no other size follows: the job's code may refuse it, or pad it.
    """
    sizes = sorted(size for size, trace in known.items() if all(name != FAILED for name, _, _ in trace.phases))
    below, above = [size for size in sizes if size < items], [size for size in sizes if size > items]
    for low, high in ((low, high) for low in reversed(below) for high in above[-1:] + above[:2]):
        between = [size for size in sizes if low < size < high]
        if not between or not _stand_for((low, *between, high), items):
            continue
        line = range_between(low, known[low], high, known[high], exact=1 << 62)
        if line is not None and all(_is_between(line, known, size) for size in between):
            return _at(line, known, items)
    return None


def unlike_size(items: int) -> int:
    """The next size that is odd, and a multiple of 3 or one more: of another remainder than a size of 2."""
    odd = items | 1
    return odd + 2 if odd % 6 == 5 else odd


def size_between(low: int, high: int) -> int:
    """A size between two, about as many times the lower as the higher is of it; ``low`` where there is none.

    It leaves another remainder than both where they leave the same one, so that the three stand for every size.
    """
    middle = unlike_size(math.isqrt(low * high))
    if not low < middle < high or high - low < NARROW:
        middle = (low + high) // 2
    parts = [part for part in PARTS if low % part == high % part]
    near = chain(range(middle, min(middle + AWAY, high)), range(max(middle - AWAY, low + 1), middle))
    return next((size for size in near if all(size % part != low % part for part in parts)), middle)


def divide_unlike(sizes: Sequence[int]) -> bool:
    """Whether sizes stand for all between them: none of ``PARTS`` leaves one remainder of all."""
    return all(len({size % part for size in sizes}) > 1 for part in PARTS)


def _stand_for(sizes: Sequence[int], items: int) -> bool:
    """Whether sizes show how a step of so many items divides: where all leave one remainder, it leaves that, too."""
    remainders = ({size % part for size in sizes} for part in PARTS)
    return all(len(left) > 1 or items % part in left for part, left in zip(PARTS, remainders, strict=True))


def _is_between(line: StepRange, known: Mapping[int, Trace], items: int) -> bool:
    trace, first, last = known[items], line.trace, known[line.high]
    part = (items - line.low) / (line.high - line.low)
    return is_on(line, items, trace) and all(
        _same_operators(first, other) for other in (trace, last)
    ) and are_calls_of(trace, _calls_at(line, last, items)) and all(
        np.allclose(getattr(trace, name), _between(getattr(first, name), getattr(last, name), part), ESTIMATES)
        for name in ("operator_flops", "operator_bytes")
    )  # fmt: skip


def _same_operators(first: Trace, other: Trace) -> bool:
    columns: Sequence[str] = ("operator", "made_by", "operator_name", "operator_module", "operator_part")
    tables: Sequence[str] = ("names", "modules", "parts", "assumed")
    return all(np.array_equal(getattr(first, name), getattr(other, name)) for name in columns) and all(
        getattr(first, name) == getattr(other, name) for name in tables
    )


def _at(line: StepRange, known: Mapping[int, Trace], items: int) -> Trace | None:
    nbytes, calls = line.bytes_at(items), _calls_at(line, known[line.high], items)
    if nbytes is None or calls is None:
        return None
    part = (items - line.low) / (line.high - line.low)
    work = {
        name: np.rint(_between(getattr(line.trace, name), getattr(known[line.high], name), part)).astype(np.int64)
        for name in ("operator_flops", "operator_bytes")
    }
    return replace(line.trace, nbytes=nbytes, operator_card_call=calls[0], card_calls=calls[1], **work)


def _calls_at(line: StepRange, last: Trace, items: int) -> Calls | None:
    return calls_between(line.trace, last, (items - line.low, line.high - line.low))


def _between(low: np.ndarray, high: np.ndarray, part: float) -> np.ndarray:
    """float (N,): the point between two, which is at ``low`` for a part of 0."""
    result: np.ndarray = low + part * (high.astype(np.float64) - low)
    return result
