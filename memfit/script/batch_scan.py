"""The largest batch of a script: traced at three sizes, from which the bytes of every tensor follow.

Where the events are the same at each size, the bytes of each storage are a + b * size: two sizes give them, a third
one checks them, and any other is replayed. The answer is then traced itself, and the next larger size with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.events import Trace
from memfit.script.launch import trace_script
from memfit.script.outcome import ScriptOutcome, TraceRequest
from memfit.script.request_device import device_of
from memfit.sizes import format_size

PLACEHOLDER = "{batch}"
MOST = 1 << 20
"""Sizes past this are not asked for."""


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch on a card.

    Attributes:
        batch: None where even the smallest traced size does not fit, or where bytes do not follow from the size.
        card: the card's name.
        verified: whether the script was traced at that size, and did not fit at the next one.
        sizes: the sizes that were traced.
        reason: why there is no number.
    """

    batch: int | None
    card: str
    verified: bool
    sizes: tuple[int, ...]
    process_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchScan:
    outcome: ScriptOutcome
    """At the smallest size."""
    largest: LargestBatch


def at_size(request: TraceRequest, size: int) -> TraceRequest:
    """The request with ``{batch}`` replaced."""
    command = request.command
    args = tuple(word.replace(PLACEHOLDER, str(size)) for word in command.args)
    environment = {name: value.replace(PLACEHOLDER, str(size)) for name, value in command.environment.items()}
    return replace(request, command=replace(command, args=args, environment=environment))


def scan_batches(request: TraceRequest, sizes: Sequence[int]) -> BatchScan:
    """Traces the script at the sizes and finds the largest one that fits.

    Raises:
        InputError: the script fails at one of the sizes.
    """
    device = _device(request)
    name = device.key if request.memory_bytes is None else format_size(request.memory_bytes)
    free = replace(request, enforced=False)
    outcomes = [trace_script(replace(at_size(free, size), every_card=not number)) for number, size in enumerate(sizes)]
    failed = next((outcome for outcome in outcomes if outcome.trace is None), None)
    base = outcomes[0]

    def answer(batch: int | None, *, verified: bool = False, nbytes: int | None = None, reason: str = "") -> BatchScan:
        largest = LargestBatch(
            batch=batch, card=name, verified=verified, sizes=tuple(sizes), process_bytes=nbytes, reason=reason
        )
        return BatchScan(outcome=base, largest=largest)

    if failed is not None:
        return answer(None, reason=f"a size was not traced to two complete steps ({failed.ended})")
    traces = [_of(outcome) for outcome in outcomes]
    problem = _difference(traces, sizes)
    if problem:
        return answer(None, reason=problem)
    grown = _Family(traces, sizes, device, request.command.world)
    if not grown.fits(sizes[0]):
        return answer(None, reason=f"a batch of {sizes[0]} does not fit")
    best = grown.largest(sizes[0])
    return _verified(request, best, grown, answer)


def _verified(request: TraceRequest, best: int, grown: _Family, answer: Callable[..., BatchScan]) -> BatchScan:
    """Traces the script at the answer and at the next size, and moves by one where the fit was a little off."""
    free = replace(request, enforced=False, every_card=False)
    for _ in range(3):
        fits, nbytes = _traced(at_size(free, best))
        if fits is False and best > 1:
            best -= 1
            continue
        larger = _traced(at_size(free, best + 1))[0]
        if larger:
            best += 1
            continue
        return answer(best, verified=bool(fits) and larger is False, nbytes=nbytes)
    return answer(best, nbytes=grown.process_bytes(best))


def _traced(request: TraceRequest) -> tuple[bool | None, int | None]:
    outcome = trace_script(request)
    if outcome.footprint is None:
        return None, None
    return outcome.footprint.fits, max(phase.process_bytes for phase in outcome.footprint.phases.values())


def _device(request: TraceRequest) -> Device:
    if request.device == "cpu" and request.memory_bytes is None:
        raise InputError("--device cpu", "the largest batch on a CPU depends on its memory", "write --memory SIZE too")
    return device_of(request)


def _of(outcome: ScriptOutcome) -> Trace:
    assert outcome.bare is not None
    return outcome.bare


def _difference(traces: Sequence[Trace], sizes: Sequence[int]) -> str:
    """Why the bytes at other sizes do not follow from these; empty where they do."""
    first = traces[0]
    for trace, size in zip(traces[1:], sizes[1:], strict=True):
        same = len(trace.kind) == len(first.kind) and (
            np.array_equal(trace.kind, first.kind) and np.array_equal(trace.storage, first.storage)
        )
        if not same:
            return f"the script does other things with a batch of {size} than with {sizes[0]}, so no size follows"
    start, step = _line(traces, sizes)
    for trace, size in zip(traces[2:], sizes[2:], strict=True):
        if not np.array_equal(start + step * size, trace.nbytes):
            return f"the bytes at a batch of {size} do not follow from those at {sizes[0]} and {sizes[1]}"
    return ""


def _line(traces: Sequence[Trace], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(start, step) of each storage's bytes."""
    step = (traces[1].nbytes - traces[0].nbytes) // (sizes[1] - sizes[0])
    return traces[0].nbytes - step * sizes[0], step


class _Family:
    """The trace at any size."""

    def __init__(self, traces: Sequence[Trace], sizes: Sequence[int], device: Device, world: int) -> None:
        self._start, self._step = _line(traces, sizes)
        self._trace, self._device, self._world = traces[0], device, world
        self._known: dict[int, tuple[bool, int]] = {}

    def _replayed(self, size: int) -> tuple[bool, int]:
        from memfit.planner.predict import footprint_on

        if size not in self._known:
            trace = replace(self._trace, nbytes=self._start + self._step * size)
            footprint = footprint_on(trace, self._device, self._world)
            self._known[size] = (footprint.fits, max(one.process_bytes for one in footprint.phases.values()))
        return self._known[size]

    def fits(self, size: int) -> bool:
        return self._replayed(size)[0]

    def process_bytes(self, size: int) -> int:
        return self._replayed(size)[1]

    def largest(self, low: int) -> int:
        """The largest size that fits, of those from ``low``, which does."""
        high = low * 2
        while high < MOST and self.fits(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low
