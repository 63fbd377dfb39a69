"""The largest size whose need is within a limit, of the sizes that a job takes.

A job may refuse sizes: one item where it normalises over the batch, an odd number where it divides a batch in halves,
widths that its heads do not divide, lengths beyond its table of positions. The search then begins at a size that the
job takes, goes on in multiples of a step that it takes, or ends below what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.geometry import MOST

QUESTIONS = 40
"""Sizes of which the need is asked for one answer, at most."""
REFUSALS = 100
"""Sizes that a job refuses, at most: most are refused before anything is traced."""
RAISED = 2
"""Sizes in a row below the limit, with a known one above it, after which what is left is halved."""
SECANT = 8
"""Tries after which every second one halves what is left."""
STEPS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
"""Steps that are tried where a size is refused."""
TOO_LONG = 3
"""Sizes whose trace is too long after which the search ends."""


class RefusedSizeError(Exception):
    """The job takes no step of a size.

    Args:
        error: what was raised.
        reason: the same in words.
        too_long: whether it is the trace that ended, and not the job that refuses the size.
    """

    def __init__(self, error: Exception, reason: str, *, too_long: bool = False) -> None:
        super().__init__(reason)
        self.error, self.reason, self.too_long = error, reason, too_long


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A size that was refused, and why."""

    size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SizeAnswer:
    """The largest size that is within the limit; None where no size that was tried is."""

    size: int | None
    exact: bool
    """Whether the next size was tried and is not within the limit."""
    smallest: int | None = None
    """The smallest size that the job took."""
    step: int = 1
    """Sizes from some on were multiples of it."""
    stepped: Refusal | None = None
    """The size that the job refused, from which the step follows."""
    ended: Refusal | None = None
    """The refused size at which the search ended."""
    stopped: bool = False
    """Whether ``ended`` is a size whose trace is too long, and not one that the job refuses."""

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The sizes that the job refused, as far as the answer depends on them."""
        ended = None if self.stopped else self.ended
        return tuple(dict.fromkeys(each for each in (self.stepped, ended) if each is not None))

    @property
    def may_be_larger(self) -> bool:
        """Whether larger sizes may fit: the search ended before one that does not, and the job refuses none."""
        return not self.exact and not self.refusals


def largest_size(
    needs: Callable[[int], int],
    limit: int,
    likely: Callable[[int, int, int], int | None] | None = None,
    most: int = MOST,
) -> tuple[int | None, bool]:
    """(the largest size whose need is within a limit, whether the next one's is known to exceed it).

    Args:
        needs: bytes of a size from 1 on; near enough to growing with it.
        likely: (the largest size known to be within, another known size, a size that is too large) to an estimate of
            the answer; None: the line through the needs of the two.
        most: the largest size that is asked for.
    """
    answer = search_size(needs, limit, likely, most)
    return answer.size, answer.exact


def search_size(
    needs: Callable[[int], int],
    limit: int,
    likely: Callable[[int, int, int], int | None] | None = None,
    most: int = MOST,
    *,
    starts: Sequence[int] = (1,),
    own: int | None = None,
    step: int = 1,
    must_begin: bool = True,
) -> SizeAnswer:
    """The largest size whose need is within a limit; ``needs`` may raise ``RefusedSizeError``.

    Args:
        needs, limit, likely, most: as of ``largest_size``.
        starts: sizes of which the job takes one, in the order in which they are tried.
        own: the job's own size, which it takes; None: unknown.
        step: sizes are multiples of it.
        must_begin: whether it is an error where the job takes none of ``starts``.

    Raises:
        Exception: what the job raised at its own size, or the first of ``starts``, where it takes none of them.
    """
    search = _Search(needs, limit, likely, most, own, step)
    search.begin([size for size in starts if size <= most], must_begin=must_begin)
    while search.is_open and (size := search.next_size()) is not None:
        search.try_size(size)
    return search.answer()


class _Search:
    """What is known of sizes between the largest within the limit and the smallest beyond it."""

    def __init__(
        self, needs: Callable[[int], int], limit: int, likely: Callable[[int, int, int], int | None] | None, most: int,
        own: int | None, step: int,
    ) -> None:  # fmt: skip
        self._needs, self._limit, self._likely, self._own = needs, limit, likely, own
        self._known: dict[int, int] = {}
        self._refused: dict[int, RefusedSizeError] = {}
        self._low, self._high, self._step = 0, most + 1, step
        self._raised = 0
        """Sizes in a row that were within the limit, since one was beyond it."""
        self._stepped: int | None = None
        """The refused size from which the step follows."""
        self._too_long = 0

    @property
    def is_open(self) -> bool:
        """Whether more sizes may be tried."""
        return len(self._known) < QUESTIONS and len(self._refused) < REFUSALS

    def begin(self, starts: Sequence[int], *, must_begin: bool) -> None:
        """Tries sizes until the job takes one."""
        if any(self._takes(size) for size in dict.fromkeys(starts)):
            (first,) = self._known
            self._place(first)
        elif must_begin:
            raise self._refused[self._own if self._own in self._refused else starts[0]].error

    def next_size(self) -> int | None:
        """The next size to try; None where none is left."""
        is_long = self._high in self._refused and self._refused[self._high].too_long
        if self._too_long >= TOO_LONG or (is_long and 2 * self._low >= self._high):
            return None
        if self._above(self._step) >= self._high:
            return None
        size = self._estimate() // self._step * self._step
        return size if self._low < size < self._high else self._above(self._step)

    def try_size(self, size: int) -> None:
        """Tries a size, and others near it where the job refuses it."""
        if self._takes(size):
            self._place(size)
        elif self._refused[size].too_long:
            self._high, self._too_long = size, self._too_long + 1
        elif self._own is not None and self._takes_own(self._own):
            self._place(self._own)
        elif (other := self._taken_near(size)) is not None:
            self._place(other)
        elif self._low in self._known:
            self._high = size
        else:
            self._low = size

    def answer(self) -> SizeAnswer:
        """What was established."""
        size = self._low if self._low in self._known else None
        ended = self._high if size is not None and self._high in self._refused else None
        return SizeAnswer(
            size=size, exact=self._above(self._step) >= self._high and self._high in self._known,
            smallest=min(self._known, default=None), step=self._step, stepped=self._refusal(self._stepped),
            ended=self._refusal(ended), stopped=ended is not None and self._refused[ended].too_long,
        )  # fmt: skip

    def _refusal(self, size: int | None) -> Refusal | None:
        return None if size is None else Refusal(size=size, reason=self._refused[size].reason)

    def _takes(self, size: int) -> bool:
        try:
            self._known[size] = self._needs(size)
        except RefusedSizeError as refused:
            self._refused[size] = refused
        return size in self._known

    def _place(self, size: int) -> None:
        if self._known[size] <= self._limit:
            self._low = max(self._low, size)
            self._raised += 1
        else:
            self._high = min(self._high, size)
            self._raised = 0

    def _above(self, step: int) -> int:
        return (self._low // step + 1) * step

    def _takes_own(self, own: int) -> bool:
        """Whether the job's own size lies between and was not tried, and the job takes it."""
        return self._low < own < self._high and own not in self._refused and self._takes(own)

    def _taken_near(self, size: int) -> int | None:
        """A size that the job takes on a coarser step than now; None where it takes none of them.

        The coarsest step is tried first: where its multiple below is refused, so are those of the steps that divide it.
        """
        own, refused = self._own or 0, set[int]()
        steps = [step for step in STEPS if step > self._step and step % self._step == 0 and own % step == 0]
        for step in reversed(steps):
            if any(other % step == 0 for other in refused) or not self._lies_between(near := self._near(size, step)):
                continue
            if self._takes(near):
                self._place(near)
                if self._is_bound(size, near, step):
                    self._high = min(self._high, size)
                    return near
                self._stepped, self._step = size, step
                self._step = self._finest_step(near, [other for other in steps if other < step])
                return near
            if near < size:
                refused.add(step)
        return None

    def _is_bound(self, size: int, taken: int, step: int) -> bool:
        """Whether a size is refused because it is too large, and not because it lies between multiples of a step.

        Args:
            taken: the multiple below the size.
        """
        beside, above = taken - self._step, taken + step
        if not 0 < beside < taken < size or not (beside in self._known or self._is_taken(beside)):
            return False
        return above in self._refused or not self._lies_between(above) or not self._is_taken(above)

    def _is_taken(self, size: int) -> bool:
        """Whether the job takes a size, which says where to search on."""
        if size in self._refused or not self._takes(size):
            return False
        self._place(size)
        return True

    def _finest_step(self, taken: int, steps: Sequence[int]) -> int:
        """The finest of the steps by which the job also takes a size beside one; as it is where there is no finer one.

        Args:
            steps: ascending.
        """
        fits = (step for step in steps if taken % step == 0 and taken - step > 0)
        return next((step for step in fits if taken - step in self._known or self._is_taken(taken - step)), self._step)

    def _near(self, size: int, step: int) -> int:
        below = size // step * step
        return self._above(step) if below <= self._low and self._low in self._known else below

    def _lies_between(self, size: int) -> bool:
        return self._low < size < self._high and size not in self._refused

    def _estimate(self) -> int:
        """The next size to try: the likely one, one on the line through the two known sizes next to the limit, or
        halfway between them."""
        low, high = self._low, self._high
        halfway = (low + high) // 2
        doubled = halfway if high in self._refused else min(2 * low, high - 1)
        below = [size for size in self._known if size < low]
        if low not in self._known:
            return halfway
        if high in self._refused and self._refused[high].too_long:
            return min(2 * low, halfway)
        if high in self._refused and low == self._own:
            return low + 1
        if not below and high not in self._known:
            return doubled
        if len(self._known) > SECANT and len(self._known) % 2:
            return halfway if high in self._known else doubled
        if self._raised >= RAISED and high in self._known:  # a step in the needs: the line through it creeps
            return halfway
        other = high if high in self._known else max(below)
        estimate = self._likely(low, other, high) if self._likely is not None else None
        if estimate is None:
            slope = (self._known[other] - self._known[low]) / (other - low)
            if slope <= 0:
                return doubled
            estimate = int(min(low + (self._limit - self._known[low]) / slope, 64 * low + 64))
        if estimate >= high - 1 and high in self._refused:  # the job's bound is met first: an estimate creeps
            return halfway
        return min(max(estimate, low + 1), high - 1)
