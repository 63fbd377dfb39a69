"""A trace as the few thousand moments that a plot can show, with every maximum kept exactly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.cudnn_workspaces import optional_storages
from memfit.replay.errors import OutOfMemory

MOST = 2000
"""Moments that a timeline has at most."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a phase (``forward`` of ``window 2``), as events [start, end), with its peak in bytes asked for."""

    phase: str
    part: str
    start: int
    end: int
    peak: int
    peak_event: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Bytes alive after K of a trace's events."""

    events: np.ndarray
    """(K,) numbers of the events, ascending."""
    alive: np.ndarray
    """(categories, K) bytes asked for and alive just after the event, in the order of CATEGORIES."""
    held: np.ndarray | None
    """(K,) bytes that the allocator has reserved; None on a device without a cache."""
    spans: tuple[Span, ...]
    failed: int | None
    """The event for which the device has no room; None: there is room for all."""
    count: int
    """Events of the whole trace."""

    @property
    def total(self) -> np.ndarray:
        """(K,) bytes asked for and alive."""
        return self.alive.sum(0)


def timeline(trace: Trace, device: Device, most: int = MOST) -> Timeline:
    """The trace in at most ``most`` moments; the largest total, reserved bytes and bytes of each category of every
    phase are among them."""
    alive = alive_by_category(trace)
    total = alive.sum(0)
    held, failed = reserved(trace, device) if device.is_cuda else (None, _first_over(total, device.usable_bytes))
    phases = [(start, end) for _, start, end in trace.phases if end > start]
    spans = spans_of(trace, total)
    series = [*alive[alive.any(1)], total] + ([held] if held is not None else [])
    kept = [start + int(row[start:end].argmax()) for start, end in phases for row in series]
    kept += [event for start, end in phases for event in (start, end - 1)] + [span.peak_event for span in spans]
    if failed is not None:
        kept.append(failed)
    moments = np.union1d(kept, extremes(total, phases, max(most - len(set(kept)), 2)))
    return Timeline(
        events=moments,
        alive=alive[:, moments],
        held=None if held is None else held[moments],
        spans=spans,
        failed=failed,
        count=len(trace.kind),
    )


def alive_by_category(trace: Trace) -> np.ndarray:
    """(categories, E) bytes asked for and alive just after every event."""
    real = trace.storage >= 0
    signed = np.where(trace.kind == ALLOCATE, 1, np.where(trace.kind == FREE, -1, 0)) * np.where(
        real, trace.nbytes[trace.storage], 0
    )
    category = np.where(real, trace.category[trace.storage], 0)
    return np.stack([np.cumsum(np.where(category == code, signed, 0)) for code in range(len(CATEGORIES))])


def extremes(values: np.ndarray, phases: list[tuple[int, int]], most: int) -> np.ndarray:
    """Indices of the largest and the smallest value of equal stretches, at most ``most`` of them (two for a phase at
    the least)."""
    size = max(sum(end - start for start, end in phases), 1)
    indices: list[int] = []
    for start, end in phases:
        stretches = min(max(most * (end - start) // size // 2, 1), end - start)
        edges = start + np.arange(stretches + 1) * (end - start) // stretches
        for low, high in pairwise(edges.tolist()):
            indices += [low + int(values[low:high].argmax()), low + int(values[low:high].argmin())]
    return np.unique(np.array(indices, np.int64))


def reserved(trace: Trace, device: Device) -> tuple[np.ndarray, int | None]:
    """Bytes that the caching allocator holds after every event, and the event that fails under the device's memory.

    Up to the failure they are those under the device's memory, from there on those of a device without a limit.
    """
    limit = allocator_limit(device)
    free, _ = _replay(trace, None)
    if limit is None or free.max(initial=0) <= limit:
        return free, None
    held, failed = _replay(trace, limit)
    if failed is not None:
        held[failed:] = free[failed:]
    return held, failed


def allocator_limit(device: Device) -> int | None:
    """What tensors may take: the device's usable bytes without those of the context."""
    return None if device.usable_bytes is None else device.usable_bytes - (device.context_bytes or 0)


def _replay(trace: Trace, capacity: int | None) -> tuple[np.ndarray, int | None]:
    allocator = CachingAllocator(capacity)
    held = np.zeros(len(trace.kind), np.int64)
    rows = zip(trace.kind.tolist(), trace.storage.tolist(), strict=True)
    nbytes, streams = trace.nbytes.tolist(), trace.stream.tolist()
    optional, missing = optional_storages(trace), set[int]()
    for event, (kind, storage) in enumerate(rows):
        if kind == ALLOCATE:
            try:
                allocator.malloc(storage, nbytes[storage], streams[storage])
            except OutOfMemory:
                if storage not in optional:
                    return held, event
                missing.add(storage)
        elif kind == FREE:
            if storage not in missing:
                allocator.free(storage)
        else:
            allocator.empty_cache()
        held[event] = allocator.reserved
    return held, None


def _first_over(total: np.ndarray, limit: int | None) -> int | None:
    over = np.flatnonzero(total > limit) if limit is not None else np.array([], int)
    return int(over[0]) if len(over) else None


def spans_of(trace: Trace, total: np.ndarray) -> tuple[Span, ...]:
    """The phases' parts in order; windows are numbered, and parts of one micro-batch after another are apart."""
    part_of = trace.operator_part[trace.operator]
    windows, spans = 0, []
    for name, start, end in trace.phases:
        windows += name == "train"
        label = f"window {windows}" if name == "train" else name
        if end == start:
            continue
        edges = [start, *(start + 1 + np.flatnonzero(np.diff(part_of[start:end]))).tolist(), end]
        for low, high in pairwise(edges):
            event = low + int(total[low:high].argmax())
            part = trace.parts[part_of[low]]
            spans.append(Span(phase=label, part=part, start=low, end=high, peak=int(total[event]), peak_event=event))
    return tuple(spans)


def place_of(trace: Trace, event: int) -> tuple[str, str]:
    """(module, operator) during which an event happened."""
    row = trace.operator[event]
    return trace.modules[trace.operator_module[row]], trace.names[trace.operator_name[row]]
