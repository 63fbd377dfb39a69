"""A sequence of windows of different shapes through one allocator: what creeps, what is fragmented, and when.

The setup and the first window (which makes the optimizers' state) come first, then each window with its own shapes.
Reserved memory grows where a window asks for a block that no earlier one left behind. Soon no window does, and then
each is replayed fast (``memfit.replay.fast_replay``), and one whose shapes came before in the same state not at all.
The result is that of replaying every event (``tests/replay/test_window_sequence.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.events import ALLOCATE, EMPTY_CACHE, Trace
from memfit.job import Shape
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.errors import OutOfMemory
from memfit.replay.fast_replay import Codes, can_run, free_blocks, peak_if_served, rounded
from memfit.replay.window_events import WindowLayout, window_layout
from memfit.trace.trace_family import TraceFamily

Window = tuple[Shape, ...]
"""The shapes of a window's micro-batches."""

_OWN = 1 << 40
"""Added to the storages of a window, apart from those of the setup."""


@dataclass(frozen=True, kw_only=True)
class SequencePeaks:
    """Peaks in bytes over a sequence of windows."""

    windows: int
    """Windows that ran: all of them, or those before the one that failed."""
    distinct_shapes: int
    """Different windows, by their micro-batches' shapes."""
    allocated_bytes: int
    allocated_window: int
    """The first window at whose peak so much was allocated."""
    reserved_bytes: int
    reserved_window: int
    growth: tuple[tuple[int, int], ...]
    """(window, reserved bytes after it), wherever they changed; the first is window 0's."""
    failed_window: int | None
    """The window that asks for what the device does not have; None: none does."""

    @property
    def ratio(self) -> float:
        """Reserved over allocated bytes, at their peaks."""
        return self.reserved_bytes / self.allocated_bytes


def replay_sequence(
    family: TraceFamily,
    windows: Sequence[Window],
    *,
    capacity: int | None = None,
    config: AllocatorConfig | None = None,
    fast: bool = True,
) -> SequencePeaks:
    """Replays windows one after the other.

    Args:
        family: traced with windows of two micro-batches where a window has more than one.
        capacity: what the allocator may reserve, in bytes; None: without a limit.
        fast: False replays every event of every window.
    """
    replay = _Replay(family, capacity, config or AllocatorConfig(), fast)
    return replay.run(windows)


class _Replay:
    def __init__(self, family: TraceFamily, capacity: int | None, config: AllocatorConfig, fast: bool) -> None:
        self.family, self.config = family, config
        self.fast = fast and can_run(config)
        self.allocator = CachingAllocator(capacity, config)
        self.free = free_blocks(self.allocator)
        self.known: dict[Window, int] = {}
        """Windows that cached blocks serve, as the allocator stands, and what they allocate at their peak."""
        self.layouts: dict[tuple[int, ...], tuple[WindowLayout, Codes, list[Trace]]] = {}
        """The layouts, by the traces that a window's events come from."""
        self.carried: list[int] = []
        self.number = 0

    def run(self, windows: Sequence[Window]) -> SequencePeaks:
        allocated, reserved = (0, 0), (0, 0)
        growth: list[tuple[int, int]] = []
        failed = None
        for number, window in enumerate(windows):
            self.number = number
            self.allocator.reset_peaks()
            try:
                peak = self.first(window) if number == 0 else self.next(window, allocated[0])
            except OutOfMemory:
                failed = number
                break
            if peak > allocated[0]:
                allocated = (peak, number)
            if self.allocator.peak_reserved > reserved[0]:
                reserved = (self.allocator.peak_reserved, number)
            if not growth or self.allocator.reserved != growth[-1][1]:
                growth.append((number, self.allocator.reserved))
        return SequencePeaks(
            windows=len(windows) if failed is None else failed,
            distinct_shapes=len(set(windows)),
            allocated_bytes=allocated[0],
            allocated_window=allocated[1],
            reserved_bytes=reserved[0],
            reserved_window=reserved[1],
            growth=tuple(growth),
            failed_window=failed,
        )

    def first(self, window: Window) -> int:
        """The setup and the first window, as they were traced at the first micro-batch's shape."""
        trace = self.family.at(window[0])
        end = next(end for name, _, end in trace.phases if name == "train")
        self.all_events(trace, end)
        born = trace.storage[:end][trace.kind[:end] == ALLOCATE]
        layout, _ = self.layout([trace] * len(window))
        later = layout.number[layout.carried_in]
        self.carried = later[np.isin(later, born)].tolist()
        self.changed()
        return self.allocator.peak_allocated

    def next(self, window: Window, beaten: int) -> int:
        """The window's peak; one that is no more than ``beaten`` may be told too low."""
        peak = self.known.get(window)
        if peak is not None:
            return peak
        traces = [self.family.at(shape) for shape in window]
        layout, codes = self.layout(traces)
        nbytes = layout.nbytes(traces)
        if self.fast and not len(layout.carried_in):
            units = rounded(nbytes, self.config)
            most = beaten - self.allocator.allocated
            added = peak_if_served(layout.kind, layout.storage, units, self.free, codes, most)
            if added is not None:
                self.known[window] = self.allocator.allocated + added
                return self.known[window]
        before = self.allocator.reserved, self.allocator.retries
        self.every_event(layout, nbytes.tolist())
        if len(layout.carried_in) or before != (self.allocator.reserved, self.allocator.retries):
            self.changed()
        return self.allocator.peak_allocated

    def layout(self, traces: list[Trace]) -> tuple[WindowLayout, Codes]:
        key = tuple(id(trace.storage) for trace in traces)
        if key not in self.layouts:
            self.layouts[key] = window_layout(traces), {}, traces
        return self.layouts[key][:2]

    def changed(self) -> None:
        self.known.clear()
        if self.fast:
            self.free = free_blocks(self.allocator)

    def all_events(self, trace: Trace, end: int) -> None:
        nbytes = trace.nbytes.tolist()
        for kind, storage in zip(trace.kind[:end].tolist(), trace.storage[:end].tolist(), strict=True):
            if kind == ALLOCATE:
                self.allocator.malloc(storage, nbytes[storage])
            elif kind == EMPTY_CACHE:
                self.allocator.empty_cache()
            else:
                self.allocator.free(storage)

    def every_event(self, layout: WindowLayout, nbytes: list[int]) -> None:
        """A window's events, with storages that it takes over from the one before and leaves to the next."""
        own = _OWN * (1 + self.number % 2)
        names = dict(zip(layout.carried_in.tolist(), self.carried, strict=False))
        for kind, storage in zip(layout.kind.tolist(), layout.storage.tolist(), strict=True):
            if kind == ALLOCATE:
                self.allocator.malloc(own + storage, nbytes[storage])
            else:
                self.allocator.free(names.get(storage, own + storage))
        self.carried = [own + storage for storage in layout.carried_out.tolist()]
