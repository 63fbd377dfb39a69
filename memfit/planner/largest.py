"""The largest micro-batch, sequence or setting that fits: sizes are predicted until one fits and the next does not.

Storages grow nearly in proportion to the size, so that the traces of two sizes lead close to the limit: their storages'
bytes are interpolated and replayed. Every candidate is then predicted itself, exactly as ``memfit predict`` does: from
a trace of its own, or from those of sizes around it (``memfit.planner.step_range``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.errors import InputError, describe
from memfit.events import Trace
from memfit.geometry import MOST
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.job_facts import Policy
from memfit.planner.prediction import Prediction, TracedQuestion, answer, holds_for, need_on
from memfit.planner.size_search import Refusal, RefusedSizeError, SizeAnswer, largest_size, search_size
from memfit.planner.step_range import size_between, unlike_size
from memfit.trace.event_limit import TooManyEventsError, most_events
from memfit.trace.interpolation import interpolated

EVENTS = 200_000
"""Events of the trace of a size that nobody asked for, at most, or twice those of the first size."""
LARGEST = 1 << 16
"""Items of the micro-batch that is traced beside the smallest where one item more needs no more memory."""
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})
BEYOND = 1.5
"""That micro-batch needs about this multiple of the memory of the largest card for which the traces hold."""
ITEMS = (1, 2, 3, 4, 8, 16)
"""Items of which a job takes some: 2 where it normalises over the batch, more where it divides it."""
FEWEST = 8
"""Items from which on smaller steps are traced on a CPU, see ``memfit.trace.scratch_by_size``."""


@dataclass(frozen=True, kw_only=True)
class Vary:
    """What a size is of."""

    name: str
    """What its answers are kept under."""
    at: Callable[[int], tuple[Mapping[str, Any], Shape]]
    """(settings that differ from the job's, the micro-batch) of a size."""
    starts: Sequence[int]
    """Sizes of which the job takes one."""
    own: int | None = None
    """The job's own size; None: unknown."""
    of_items: bool = False
    """Whether sizes are items, so that sizes between two that were traced may follow from them."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size that fits a device under a policy, and its prediction; None where not even the smallest fits."""

    device: Device
    policy: Policy
    search: SizeAnswer
    """What the search established of sizes."""
    prediction: Prediction | None
    certain: int | None = None
    """The largest size whose whole interval fits, see ``with_certain``; None where not even the smallest's does."""

    @property
    def size(self) -> int | None:
        """Items, units of length, or the setting's value."""
        return self.search.size

    @property
    def exact(self) -> bool:
        """Whether the next size was predicted and does not fit."""
        return self.search.exact

    @property
    def may_be_larger(self) -> bool:
        """Whether larger sizes may fit, see ``SizeAnswer.may_be_larger``."""
        return self.search.may_be_larger


def largest_of(policy: Policy, device: Device, asked: AskedJob, vary: Vary) -> Largest:
    """The largest size that fits.

    Args:
        vary: what a size is of.

    Raises:
        Exception: what the job's code raised, where it takes no size that was tried first.
    """
    sizes = _Sizes(policy, device, asked, vary)
    answer = _established(sizes, device, asked, vary)
    prediction = sizes.prediction(answer.size) if answer.size is not None else None
    return Largest(device=device, policy=policy, search=answer, prediction=prediction)


def largest_size_of(policy: Policy, device: Device, asked: AskedJob, vary: Vary) -> SizeAnswer:
    """What the search of ``largest_of`` establishes, without a prediction of the size; arguments and errors alike."""
    return _established(_Sizes(policy, device, asked, vary), device, asked, vary)


def _established(sizes: _Sizes, device: Device, asked: AskedJob, vary: Vary) -> SizeAnswer:
    """The answer that is kept, or found now."""
    known = asked.remembered(sizes.key)
    if known is not None:
        return _answer_from_json(known)
    answer = search_size(sizes.needs, device.usable_bytes or 0, sizes.likely, starts=vary.starts, own=vary.own)
    asked.remember(sizes.key, asdict(answer))
    return answer


def with_certain(answer: Largest, asked: AskedJob, vary: Vary) -> Largest:
    """The answer with the largest size whose whole interval fits; arguments as of ``largest_of``."""
    if answer.prediction is None or answer.size is None or answer.prediction.footprint.verdict == "yes":
        return replace(answer, certain=answer.size)
    sizes = _Sizes(answer.policy, answer.device, asked, vary)
    known = asked.remembered(f"certain {sizes.key}")
    if known is None:
        whole = (answer.device.usable_bytes or 0) + answer.device.free_bytes
        smaller = search_size(
            sizes.highest, whole, most=answer.size, starts=(answer.size,), step=answer.search.step, must_begin=False
        )
        known = [smaller.size]
        asked.remember(f"certain {sizes.key}", known)
    return replace(answer, certain=known[0])


def largest_of_each(
    policies: Sequence[Policy], devices: Sequence[Device], asked: AskedJob, vary: Vary
) -> list[Largest]:
    """``largest_of`` with ``with_certain`` for every policy on every device, in order; errors as there.

    Where another process has the job loaded and traces for this one, a copy of this one asks it for half of the
    policies meanwhile.
    """
    if len(policies) > 1 and (elsewhere := asked.loaded_elsewhere()) is not None and elsewhere.listens():
        _search_on_two_cores(policies, devices, asked, vary)
    return [
        with_certain(largest_of(policy, device, asked, vary), asked, vary) for policy in policies for device in devices
    ]


def _search_on_two_cores(policies: Sequence[Policy], devices: Sequence[Device], asked: AskedJob, vary: Vary) -> None:
    """Has the answers kept, where this machine has a core and memory for a copy of this process."""
    from memfit.forked_process import NoResultError, has_core_for_copy, with_copy

    def search(some: Sequence[Policy]) -> None:
        for policy in some:
            for device in devices:
                with_certain(largest_of(policy, device, asked, vary), asked, vary)

    def search_and_keep(some: Sequence[Policy]) -> None:
        search(some)
        asked.keep()

    if has_core_for_copy():
        with suppress(OSError, NoResultError):
            with_copy(partial(search, policies[::2]), partial(search_and_keep, policies[1::2]))
            asked.look_again()


class _Sizes:
    """Predictions of one policy on one device by size; arguments as of ``largest_of``."""

    def __init__(self, policy: Policy, device: Device, asked: AskedJob, vary: Vary) -> None:
        self._policy, self._device, self._asked, self._vary = policy, device, asked, vary
        self._questions: dict[int, TracedQuestion] = {}
        self._predictions: dict[int, Prediction] = {}
        self._is_bracketed = False

    @property
    def key(self) -> str:
        """What the answer is kept under."""
        policy = self._policy  # whatever its name
        words = repr((policy.checkpointing, policy.changes, self._vary.name, self._device))
        return f"largest {hashlib.sha256(words.encode()).hexdigest()[:32]}"

    def prediction(self, size: int) -> Prediction:
        """A size predicted as ``memfit predict`` does."""
        if size not in self._predictions:
            begin = time.perf_counter()
            prediction = answer(self._traced(size), self._asked.name, self._device)
            self._predictions[size] = replace(prediction, seconds=time.perf_counter() - begin)
        return self._predictions[size]

    def _traced(self, size: int) -> TracedQuestion:
        if size not in self._questions:
            changes, shape = self._vary.at(size)
            if not self._device.is_cuda and self._vary.of_items and size >= FEWEST:
                self._trace_smaller(shape)
            self._questions[size] = self._question(shape, changes)
        return self._questions[size]

    def needs(self, size: int) -> int:
        """Process bytes of a size.

        Raises:
            RefusedSizeError: the job takes no such size, or its trace is too long.
        """
        if len(self._questions) > 1 and not self._is_bracketed:
            self._is_bracketed = True
            self._bracket()
        question = self._asked_for(size)
        return max(self._bytes(trace, question) for trace in question.traces.values())

    def highest(self, size: int) -> int:
        """Where the interval of a size's process bytes ends; raises as ``needs`` does."""
        self._asked_for(size)
        return max(phase.process_bytes_high for phase in self.prediction(size).footprint.phases.values())

    def _asked_for(self, size: int) -> TracedQuestion:
        try:
            if not self._questions:
                return self._traced(size)
            with most_events(max(EVENTS, 2 * _events(next(iter(self._questions.values()))))):
                return self._traced(size)
        except MemoryError:
            raise
        except Exception as error:  # the job's code is the user's
            is_long = isinstance(error, TooManyEventsError)
            reason = f"{error.seen}: {error.why}" if isinstance(error, InputError) else describe(error)
            raise RefusedSizeError(error, reason, too_long=is_long) from error

    def _trace_smaller(self, shape: Shape) -> None:
        """Traces the steps that spare one of a size most measurements of what its calls allocate."""
        most = max(4, shape.items // 8)
        with suppress(Exception):  # the job's code may refuse a size that nobody asked for
            for items in (most // 2, 3 * most // 4, most):  # not 1, whose tensors have other strides
                self._question(Shape(items=items, length=shape.length))

    def _bracket(self) -> None:
        """Traces a size that no card holds and one in between, from which all others follow on every card."""
        if not self._vary.of_items or not self._device.is_cuda:
            return
        first, second = (self._questions[size] for size in sorted(self._questions)[:2])
        sharing = sharing_cards(second)
        low, high = (answer(each, self._asked.name, self._device) for each in (first, second))
        most = items_beyond(low, high, (self._device, *sharing))
        same = 2 * max(_events(first), _events(second))
        for items in (most, size_between(2, most)):
            if items > second.shape.items:
                # the job's code may refuse a size that nobody asked for, and none follows from another number of events
                with suppress(Exception), most_events(same):
                    self._question(Shape(items=items, length=second.shape.length))

    def _question(self, shape: Shape, changes: Mapping[str, Any] = NO_CHANGES) -> TracedQuestion:
        modes, together = self._policy.checkpointing, {**self._policy.changes, **changes}
        if modes and changes:
            modes = self._asked.every_with(together)
        return self._asked.question(shape, self._device, checkpointing=modes, changes=together)

    def likely(self, low: int, other: int, high: int) -> int | None:
        """The largest size from ``low`` to below ``high`` that fits if storages grow as between ``low`` and ``other``;
        None where their events differ."""
        known = self._traced(low)
        first, second = (_largest_trace(self._traced(size)) for size in (low, other))

        def needs(more: int) -> int:
            trace = interpolated(first, second, (more - 1) / (other - low))
            if trace is None:
                return (self._device.usable_bytes or 0) + 1
            return self._bytes(trace, known)

        if interpolated(first, second, 1.0) is None:
            return None
        more, _ = largest_size(needs, self._device.usable_bytes or 0, most=high - low)
        return None if more is None else low + more - 1

    def _bytes(self, trace: Trace, question: TracedQuestion) -> int:
        """What a trace needs in the setting of a question; more than the device has where it does not fit."""
        need = need_on(trace, self._device, question.world, question.allocator, mesh=question.mesh)
        most = max(need.process_bytes.values())
        return most if need.fits else max(most, (self._device.usable_bytes or 0) + 1)


def by_items(length: int | None) -> Vary:
    """Sizes are items of this length (None: samples have no length)."""
    return Vary(
        name=f"items of {length}", at=lambda size: ({}, Shape(items=size, length=length)), starts=ITEMS, of_items=True
    )


def by_length(items: int, longest: int | None = None) -> Vary:
    """Sizes are the length of so many items.

    Args:
        longest: the length of the job's own longest item.
    """
    starts = (1,) if longest is None else (1, longest)
    return Vary(
        name=f"length of {items}", at=lambda size: ({}, Shape(items=items, length=size)), starts=starts, own=longest
    )


def by_setting(asked: AskedJob, setting: str, items: int) -> Vary:
    """Sizes are a whole-number setting's values, for so many of the longest items that the job then has.

    Raises:
        InputError: the job has no such setting.
    """
    numbers = asked.facts.whole_numbers
    if setting not in numbers:
        names = ", ".join(numbers)
        raise InputError(f"--vary {setting}", "no whole-number setting of the job", f"write one of {names}")
    own = numbers[setting]

    def at(size: int) -> tuple[Mapping[str, Any], Shape]:
        return {setting: size}, Shape(items=items, length=asked.longest_with({setting: size}))

    starts = (1,) if own is None or own < 1 else (1, own)
    return Vary(name=f"{setting} with {items}", at=at, starts=starts, own=starts[-1] if len(starts) > 1 else None)


def items_beyond(low: Prediction, high: Prediction, cards: Iterable[Device]) -> int:
    """Items that no card holds, by the line through two predictions of the same length."""
    limit = max(card.usable_bytes or 0 for card in cards) * BEYOND
    first, second = low.shape.items, high.shape.items
    needs = [max(phase.allocated_bytes for phase in known.footprint.phases.values()) for known in (low, high)]
    each = (needs[1] - needs[0]) / (second - first)
    enough = first + int((limit - needs[0]) / each) + 1 if each > 0 else LARGEST
    return min(unlike_size(enough), MOST // (low.shape.length or 1))


def _events(question: TracedQuestion) -> int:
    return len(_largest_trace(question).kind)


def _largest_trace(question: TracedQuestion) -> Trace:
    """Of the ranks' traces, the one of most events."""
    return max(question.traces.values(), key=lambda trace: len(trace.kind))


def _answer_from_json(values: Mapping[str, Any]) -> SizeAnswer:
    refusals = {name: values[name] and Refusal(**values[name]) for name in ("stepped", "ended")}
    return SizeAnswer(**{**values, **refusals})


def sharing_cards(question: TracedQuestion) -> list[Device]:
    """Cards of the catalogue for which a question's traces hold."""
    return [card for card in catalogue().values() if card.is_cuda and holds_for(question, card)]
