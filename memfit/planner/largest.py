"""The largest micro-batch, sequence or setting that fits: sizes are predicted until one fits and the next does not.

Storages grow nearly in proportion to the size, so that the traces of two sizes lead close to the limit: their storages'
bytes are interpolated and replayed. Every candidate is then predicted itself, exactly as ``memfit predict`` does: from
a trace of its own, or from those of sizes around it (``memfit.planner.step_range``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.errors import InputError
from memfit.footprint import Footprint
from memfit.geometry import MOST
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob, JobFacts, Policy
from memfit.planner.prediction import Prediction, TracedQuestion, footprint_on, holds_for
from memfit.trace.interpolation import interpolated

Vary = Callable[[int], tuple[Mapping[str, Any], Shape]]
"""(settings that differ from the job's, the micro-batch) of a size."""
QUESTIONS = 40
"""Predictions for one answer, at most."""
SECANT = 8
"""Predictions after which every second one halves what is left."""
LARGEST = 1 << 16
"""Items of the micro-batch that is traced beside the smallest where one item more needs no more memory."""
BEYOND = 1.5
"""That micro-batch needs about this multiple of the memory of the largest card for which the traces hold."""
FEWEST = 8
"""Items from which on smaller steps are traced on a CPU, see ``memfit.trace.scratch_by_size``."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size that fits a device under a policy, and its prediction; None where not even the smallest fits."""

    device: Device
    policy: Policy
    size: int | None
    """Items, units of length, or the setting's value."""
    prediction: Prediction | None
    exact: bool
    """Whether the next size was predicted and does not fit."""
    certain: int | None = None
    """The largest size whose whole interval fits, see ``with_certain``; None where not even the smallest's does."""


def largest_of(policy: Policy, device: Device, asked: AskedJob, vary: Vary) -> Largest:
    """The largest size that fits.

    Args:
        vary: what a size is of.
    """
    sizes = _Sizes(policy, device, asked, vary)
    known = asked.remembered(sizes.key)
    if known is None:
        size, exact = largest_size(sizes.needs, device.usable_bytes or 0, sizes.likely)
        asked.remember(sizes.key, [size, exact])
    else:
        size, exact = known
    prediction = sizes.prediction(size) if size is not None else None
    return Largest(device=device, policy=policy, size=size, prediction=prediction, exact=exact)


def with_certain(answer: Largest, asked: AskedJob, vary: Vary) -> Largest:
    """The answer with the largest size whose whole interval fits; arguments as of ``largest_of``."""
    if answer.prediction is None or answer.size is None or answer.prediction.footprint.verdict == "yes":
        return replace(answer, certain=answer.size)
    sizes = _Sizes(answer.policy, answer.device, asked, vary)
    known = asked.remembered(f"certain {sizes.key}")
    if known is None:
        most = answer.size - 1
        known = [largest_size(sizes.highest, answer.device.usable_bytes or 0, most=most)[0] if most else None]
        asked.remember(f"certain {sizes.key}", known)
    return replace(answer, certain=known[0])


class _Sizes:
    """Predictions of one policy on one device by size; arguments as of ``largest_of``."""

    def __init__(self, policy: Policy, device: Device, asked: AskedJob, vary: Vary) -> None:
        self._policy, self._device, self._asked, self._vary = policy, device, asked, vary
        self._known: dict[int, Prediction] = {}
        self._is_bracketed = False

    @property
    def key(self) -> str:
        """What the answer is kept under."""
        sizes = [self._vary(size) for size in (1, 2)]
        return f"largest {hashlib.sha256(repr((self._policy, sizes, self._device)).encode()).hexdigest()[:32]}"

    def prediction(self, size: int) -> Prediction:
        """A size predicted as ``memfit predict`` does."""
        if size not in self._known:
            changes, shape = self._vary(size)
            if not self._device.is_cuda and not changes and shape.items == size >= FEWEST:
                self._trace_smaller(shape)
            changes = {**self._policy.changes, **changes}
            self._known[size] = self._asked.predict(
                shape, self._device, checkpointing=self._policy.checkpointing, changes=changes
            )
        return self._known[size]

    def needs(self, size: int) -> int:
        """Process bytes of a size."""
        if size > 2 and not self._is_bracketed:
            self._is_bracketed = True
            self._bracket()
        return self._bytes(self.prediction(size).footprint)

    def highest(self, size: int) -> int:
        """Where the interval of a size's process bytes ends."""
        return max(phase.process_bytes_high for phase in self.prediction(size).footprint.phases.values())

    def _trace_smaller(self, shape: Shape) -> None:
        """Traces the steps that spare one of a size most measurements of what its calls allocate."""
        most = max(4, shape.items // 8)
        with suppress(Exception):  # the job's code may refuse a size that nobody asked for
            for items in (most // 2, 3 * most // 4, most):  # not 1, whose tensors have other strides
                self._question(Shape(items=items, length=shape.length))

    def _bracket(self) -> None:
        """Traces a size that no card holds and one in between, from which all others follow on every card."""
        (_, first), (changes, second) = self._vary(1), self._vary(2)
        if changes or (first.length, second.items) != (second.length, 2):
            return
        sharing = sharing_cards(self._question(second))
        most = items_beyond(self.prediction(1), self.prediction(2), (self._device, *sharing))
        for items in (most, math.isqrt(2 * most)):
            if items > 2 and self._device.is_cuda:
                with suppress(Exception):  # the job's code may refuse a size that nobody asked for
                    self._question(Shape(items=items, length=second.length))

    def _question(self, shape: Shape) -> TracedQuestion:
        return self._asked.question(
            shape, self._device, checkpointing=self._policy.checkpointing, changes=self._policy.changes
        )

    def likely(self, low: int, other: int, high: int) -> int | None:
        """The largest size from ``low`` to below ``high`` that fits if storages grow as between ``low`` and ``other``;
        None where their events differ."""
        first, second = (self.prediction(size).trace for size in (low, other))
        known = self.prediction(low)

        def needs(more: int) -> int:
            trace = interpolated(first, second, (more - 1) / (other - low))
            if trace is None:
                return (self._device.usable_bytes or 0) + 1
            return self._bytes(footprint_on(trace, self._device, known.world, mesh=known.mesh))

        if interpolated(first, second, 1.0) is None:
            return None
        more, _ = largest_size(needs, self._device.usable_bytes or 0, most=high - low)
        return None if more is None else low + more - 1

    def _bytes(self, footprint: Footprint) -> int:
        need = max(phase.process_bytes for phase in footprint.phases.values())
        return need if footprint.fits else max(need, (self._device.usable_bytes or 0) + 1)


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
    known = {1: needs(1)}
    if known[1] > limit:
        return None, True
    low, high = 1, most + 1
    while high - low > 1 and len(known) < QUESTIONS:
        size = _next_size(known, low, high, limit, likely)
        known[size] = needs(size)
        if known[size] <= limit:
            low = max(low, size)
        else:
            high = min(high, size)
    return low, high - low == 1 and high in known


def _next_size(
    known: Mapping[int, int], low: int, high: int, limit: int, likely: Callable[[int, int, int], int | None] | None
) -> int:
    """The next size to try: the likely one, one on the line through the two known sizes next to the limit, or halfway
    between them."""
    if len(known) == 1:
        return 2
    if len(known) > SECANT and len(known) % 2:
        return (low + high) // 2 if high in known else min(2 * low, high - 1)
    other = high if high in known else max(size for size in known if size < low)
    estimate = likely(low, other, high) if likely is not None else None
    if estimate is not None:
        return min(max(estimate, low + 1), high - 1)
    slope = (known[other] - known[low]) / (other - low)
    if slope <= 0:
        return min(2 * low, high - 1)
    return int(min(max(low + (limit - known[low]) / slope, low + 1), high - 1, 64 * low + 64))


def by_items(length: int | None) -> Vary:
    """Sizes are items of this length (None: samples have no length)."""
    return lambda size: ({}, Shape(items=size, length=length))


def by_length(items: int) -> Vary:
    """Sizes are the length of so many items."""
    return lambda size: ({}, Shape(items=items, length=size))


def by_setting(facts: JobFacts, setting: str, shape: Shape) -> Vary:
    """Sizes are a whole-number setting's values.

    Raises:
        InputError: the job has no such setting.
    """
    if setting not in facts.whole_numbers:
        numbers = ", ".join(facts.whole_numbers)
        raise InputError(f"--vary {setting}", "no whole-number setting of the job", f"write one of {numbers}")
    return lambda size: ({setting: size}, shape)


def items_beyond(low: Prediction, high: Prediction, cards: Iterable[Device]) -> int:
    """Items that no card holds, by the line through two predictions of the same length."""
    limit = max(card.usable_bytes or 0 for card in cards) * BEYOND
    first, second = low.shape.items, high.shape.items
    needs = [max(phase.allocated_bytes for phase in known.footprint.phases.values()) for known in (low, high)]
    each = (needs[1] - needs[0]) / (second - first)
    enough = first + int((limit - needs[0]) / each) + 1 if each > 0 else LARGEST
    return min(enough, MOST // (low.shape.length or 1))


def sharing_cards(question: TracedQuestion) -> list[Device]:
    """Cards of the catalogue for which a question's traces hold."""
    return [card for card in catalogue().values() if card.is_cuda and holds_for(question, card)]
