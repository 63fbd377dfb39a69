"""Replays a trace's events through an allocator and reads the peaks of each phase."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, EMPTY_CACHE, FAILED, FREE, Trace
from memfit.footprint import Footprint, PeakLocation, PhaseFootprint, Request
from memfit.replay.cudnn_workspaces import optional_storages, with_double_workspaces
from memfit.replay.errors import OutOfMemory
from memfit.replay.margins import WITHOUT_WORKSPACES, Margin, margin_of
from memfit.replay.plain_replay import plain_replay


class Allocator(Protocol):
    """What a replay needs of an allocator; see ``memfit.replay.caching_allocator`` and
    ``memfit.replay.cpu_allocator``."""

    @property
    def allocated(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    def malloc(self, storage: int, nbytes: int, stream: int = 0) -> None: ...
    def free(self, storage: int) -> None: ...
    def empty_cache(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Bytes of the process outside the allocator (context, libraries, communication), with an interval."""

    bytes: int = 0
    low: int = 0
    high: int = 0


@dataclass(kw_only=True)
class _Peak:
    allocated: int = 0
    reserved: int = 0
    event: int = -1
    largest: tuple[int, int] = (0, 0)


def footprint(
    trace: Trace,
    allocator: Callable[[int | None], Allocator],
    capacity: int | None,
    usable_bytes: int,
    outside: Outside | None = None,
    margin: Margin | None = None,
    free_bytes: int = 0,
) -> Footprint:
    """Peaks by phase, and whether every phase stays within the device.

    Where nothing fits, the peaks shown are those of a device without a limit.

    Args:
        allocator: makes a fresh allocator of a capacity in bytes (None: without a limit).
        capacity: what the allocator may reserve; a replay within it decides ``fits``.
        usable_bytes: what the process may take; ``headroom_bytes`` is against it.
        outside: the process's bytes outside the allocator.
        margin: measured errors of nets of this kind; None: the replay is exact, as on a CPU.
        free_bytes: what the device has beyond ``usable_bytes``: an interval that ends within it fits.
    """
    outside, spread = outside or Outside(), margin or Margin()
    peaks, failed = _limited_peaks(trace, allocator, capacity)
    phases = {name: _phase_footprint(trace, name, peak, outside, spread) for name, peak in peaks.items()}
    if margin is not None:
        phases = _with_larger_workspaces(trace, phases, allocator, usable_bytes + free_bytes, outside)
    if failed is not None and failed.phase not in phases:
        failed = replace(failed, phase="train")
    worst = max(phases.values(), key=lambda phase: phase.process_bytes)
    return Footprint(
        phases=phases,
        fits=failed is None,
        verdict=_verdict(failed, worst, usable_bytes, free_bytes),
        limiting_phase=failed.phase if failed else _limiting_phase(phases),
        headroom_bytes=usable_bytes - worst.process_bytes,
        failed_request=failed,
        net_kind=trace.net_kind,
        measured_runs=None if margin is None else margin.runs,
        plan_searches=_plan_searches(trace),
        assumed=trace.assumed,
        tensor_parallel=trace.tensor_parallel,
    )


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a replay needs, as a Footprint has it, without its interval: that takes a second replay."""

    fits: bool
    process_bytes: Mapping[str, int]
    """By phase."""


def need(
    trace: Trace, allocator: Callable[[int | None], Allocator], capacity: int | None, outside: Outside | None = None
) -> Need:
    """The bytes of every phase, and whether they stay within the device; arguments as of ``footprint``."""
    peaks, failed = _limited_peaks(trace, allocator, capacity)
    beside = 0 if outside is None else outside.bytes
    return Need(fits=failed is None, process_bytes={name: peak.reserved + beside for name, peak in peaks.items()})


def _limited_peaks(
    trace: Trace, allocator: Callable[[int | None], Allocator], capacity: int | None
) -> tuple[dict[str, _Peak], Request | None]:
    """Peaks within the capacity, or without a limit together with the request that fails within it."""
    peaks = _peaks_without_limit(trace, allocator)
    if capacity is None or max(peak.reserved for peak in peaks.values()) <= capacity:
        return peaks, None
    try:
        return _run(trace, allocator(capacity)), None
    except _FailedError as failure:
        return peaks, failure.request


_peaks_known: OrderedDict[str, dict[str, _Peak]] = OrderedDict()
"""Peaks without a limit by the events and the allocator: cards of which one holds what the other does share them."""
_PEAKS = 64


def _peaks_without_limit(trace: Trace, allocator: Callable[[int | None], Allocator]) -> dict[str, _Peak]:
    kind = getattr(allocator, "func", allocator)
    if not isinstance(kind, type):  # nothing tells two functions apart
        return _run(trace, allocator(None))
    digest = hashlib.sha256(repr((kind, getattr(allocator, "keywords", {}), trace.phases)).encode())
    for column in (trace.kind, trace.storage, trace.nbytes, trace.stream):
        digest.update(column.tobytes())
    key = digest.hexdigest()
    if key not in _peaks_known:
        _peaks_known[key] = _run(trace, allocator(None))
    _peaks_known.move_to_end(key)
    while len(_peaks_known) > _PEAKS:
        _peaks_known.popitem(last=False)
    return _peaks_known[key]


def _phase_footprint(trace: Trace, name: str, peak: _Peak, outside: Outside, spread: Margin) -> PhaseFootprint:
    return PhaseFootprint(
        allocated_bytes=peak.allocated,
        reserved_bytes=peak.reserved,
        process_bytes=peak.reserved + outside.bytes,
        process_bytes_low=int((peak.reserved + outside.low) * (1 + spread.low)),
        process_bytes_high=math.ceil((peak.reserved + outside.high) * (1 + spread.high)),
        at=_place(trace, peak.event),
        largest_request=_request(trace, name, *peak.largest),
        categories=_live_by_category(trace, peak.event),
    )


def _with_larger_workspaces(
    trace: Trace,
    phases: dict[str, PhaseFootprint],
    allocator: Callable[[int | None], Allocator],
    usable_bytes: int,
    outside: Outside,
) -> dict[str, PhaseFootprint]:
    """Phases whose interval holds the replay with twice the workspaces of convolutions.

    It ends at the device's memory: a workspace that does not fit is not taken, so it decides no verdict.
    """
    if all(phase.process_bytes_high >= usable_bytes for phase in phases.values()):
        return phases
    larger = with_double_workspaces(trace)
    if larger is trace:
        return phases
    above = 1 + margin_of(WITHOUT_WORKSPACES).high
    peaks = _peaks_without_limit(larger, allocator)
    high = {name: min(math.ceil((peak.reserved + outside.high) * above), usable_bytes) for name, peak in peaks.items()}
    return {
        name: replace(phase, process_bytes_high=max(phase.process_bytes_high, high.get(name, 0)))
        for name, phase in phases.items()
    }


def _verdict(failed: Request | None, worst: PhaseFootprint, usable_bytes: int, free_bytes: int) -> str:
    """Whether the largest phase fits with the whole interval, with none of it, or with a part (``close``)."""
    if failed is None and worst.process_bytes_high <= usable_bytes + free_bytes:
        return "yes"
    if failed is not None and worst.process_bytes_low > usable_bytes:
        return "no"
    return "close"


INHERITED = 0.1
"""A share of the largest phase: reserved bytes up to it count as left in the cache by an earlier phase."""


def _limiting_phase(phases: dict[str, PhaseFootprint]) -> str:
    """The phase whose tensors make the peak: a later one may hold a little more because it inherits the cache."""
    largest = max(phases, key=lambda name: phases[name].process_bytes)
    tensors = max(phases, key=lambda name: phases[name].allocated_bytes)
    more = phases[largest].process_bytes - phases[tensors].process_bytes
    return tensors if more <= INHERITED * phases[largest].process_bytes else largest


class _FailedError(Exception):
    def __init__(self, request: Request) -> None:
        self.request = request


class _EventReplay:
    """A trace's events through an allocator, one by one; as ``memfit.replay.plain_replay.PlainReplay``."""

    def __init__(self, trace: Trace, allocator: Allocator) -> None:
        self._allocator = allocator
        self._kinds, self._storages = trace.kind.tolist(), trace.storage.tolist()
        self._nbytes, self._streams = trace.nbytes.tolist(), trace.stream.tolist()
        self.missing: set[int] = set()
        self.peak_reserved = 0

    @property
    def allocated(self) -> int:
        return self._allocator.allocated

    def run(self, start: int, end: int, may_miss: frozenset[int] | None) -> tuple[np.ndarray, int | None]:
        allocator, missing, nbytes = self._allocator, self.missing, self._nbytes
        live: list[int] = []
        self.peak_reserved = allocator.reserved
        for event in range(start, end):
            storage = self._storages[event]
            if self._kinds[event] == ALLOCATE:
                try:
                    allocator.malloc(storage, nbytes[storage], self._streams[storage])
                    self.peak_reserved = max(self.peak_reserved, allocator.reserved)
                except OutOfMemory:
                    if may_miss is not None and storage not in may_miss:
                        return np.array(live, np.int64), event
                    missing.add(storage)
            elif self._kinds[event] != FREE:
                allocator.empty_cache()
            elif storage not in missing:
                allocator.free(storage)
            live.append(allocator.allocated)
        return np.array(live, np.int64), None


def _run(trace: Trace, allocator: Allocator) -> dict[str, _Peak]:
    replay = plain_replay(trace, allocator) or _EventReplay(trace, allocator)
    peaks: dict[str, _Peak] = {}
    optional = optional_storages(trace)
    for name, start, end in trace.phases:
        if name == FAILED:
            replay.run(start, end, None)
            continue
        peak = peaks.setdefault(name, _Peak())
        if replay.allocated > peak.allocated:
            peak.allocated, peak.event = replay.allocated, start - 1
        live, failed = replay.run(start, end, optional)
        if failed is not None:
            raise _FailedError(_request(trace, name, int(trace.nbytes[trace.storage[failed]]), failed))
        if live.max(initial=0) > peak.allocated:
            at = int(live.argmax())
            peak.allocated, peak.event = int(live[at]), start + at
        peak.reserved = max(peak.reserved, replay.peak_reserved)
        peak.largest = max(peak.largest, _largest(trace, start, end, replay.missing))
    return _without_small_setup(peaks)


def _largest(trace: Trace, start: int, end: int, missing: Collection[int]) -> tuple[int, int]:
    """Bytes of the largest request that was met, and the last event that made one; (0, 0): there is none."""
    storage = trace.storage[start:end]
    made = trace.kind[start:end] == ALLOCATE
    if missing:
        made &= ~np.isin(storage, list(missing))
    events = np.flatnonzero(made)
    if not len(events):
        return 0, 0
    nbytes = trace.nbytes[storage[events]]
    at = len(nbytes) - 1 - int(nbytes[::-1].argmax())
    return int(nbytes[at]), start + int(events[at])


def _without_small_setup(peaks: dict[str, _Peak]) -> dict[str, _Peak]:
    """Setup is a phase of its own where building the nets needs more than training them; else it is part of that."""
    setup, train = peaks.get("setup"), peaks.get("train")
    if setup is None or train is None or setup.allocated > train.allocated:
        return peaks
    train.reserved = max(train.reserved, setup.reserved)
    train.largest = max(train.largest, setup.largest)
    return {name: peak for name, peak in peaks.items() if name != "setup"}


def _plan_searches(trace: Trace) -> int:
    """Times that cuDNN tried its plans: the cache is emptied in a convolution."""
    rows = trace.operator[trace.kind == EMPTY_CACHE]
    return sum("convolution" in trace.names[name] for name in trace.operator_name[rows])


def _place(trace: Trace, event: int) -> PeakLocation:
    if event < 0:
        return PeakLocation(module="", operator="")
    row = trace.operator[event]
    return PeakLocation(
        module=trace.modules[trace.operator_module[row]], operator=trace.names[trace.operator_name[row]]
    )


def _request(trace: Trace, phase: str, nbytes: int, event: int) -> Request:
    place = _place(trace, event)
    return Request(bytes=nbytes, module=place.module, operator=place.operator, phase=phase)


def _live_by_category(trace: Trace, event: int) -> dict[str, int]:
    """Bytes asked for and alive just after an event, by category."""
    kind, storage = trace.kind[: event + 1], trace.storage[: event + 1]
    alive = np.zeros(len(trace.nbytes), bool)
    alive[storage[kind == ALLOCATE]] = True
    alive[storage[kind == FREE]] = False
    sums = np.bincount(trace.category[alive], weights=trace.nbytes[alive], minlength=len(CATEGORIES))
    return {name: int(value) for name, value in zip(CATEGORIES, sums, strict=True)}
