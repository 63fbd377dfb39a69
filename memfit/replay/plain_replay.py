"""A trace's events through the caching allocator under plain settings: blocks are numbers in place of objects.

The bytes are those of ``memfit.replay.caching_allocator``, which has every setting, addresses and a history. Here a
free block is one number, its size and address, in its pool's sorted list; two dictionaries find the free neighbours of
a block. Sizes and addresses are in units of 512 bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from memfit.events import ALLOCATE, EMPTY_CACHE, Trace
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import MIN_BLOCK, MIN_LARGE, ROUND_LARGE, SMALL, SMALL_SEGMENT, CachingAllocator
from memfit.replay.fast_replay import GAP, rounded

SHIFT = 40
"""Bits of an address in a free block's number: 512 TiB, since addresses of released segments do not come back."""
_FIRST = 1 << (SHIFT - 1)
_MASK = (1 << SHIFT) - 1
_SMALL = SMALL // MIN_BLOCK
_NONE = 0
"""The address of a storage that has no block."""


def plain_replay(trace: Trace, allocator: object) -> PlainReplay | None:
    """A replay that gives what a fresh allocator does with a trace; None where its settings are others."""
    if type(allocator) is not CachingAllocator or not allocator.is_plain:
        return None
    return PlainReplay(trace, allocator.config, allocator.capacity)


class PlainReplay:
    """The allocator's state between two runs of events.

    Args:
        capacity: bytes that may be reserved; None: without a limit.
    """

    def __init__(self, trace: Trace, config: AllocatorConfig, capacity: int | None) -> None:
        self._trace, self._falls = trace, config.youngest_first
        self._capacity = None if capacity is None else capacity // MIN_BLOCK
        units = rounded(trace.nbytes, config)
        is_small = units <= _SMALL
        self._sizes: list[int] = units.tolist()
        self._blocks: list[int] = units.tolist()
        """Units of each storage's block; 0: none was found."""
        self._places = [_NONE] * len(units)
        pool_of = 2 * trace.stream.astype(np.int64) + is_small
        self._pools: dict[int, list[int]] = {number: [] for number in set(pool_of.tolist())}
        """By stream and size: size << SHIFT | address of each free block, sorted."""
        self._pool_of = [*map(self._pools.__getitem__, pool_of.tolist())]
        self._least: list[int] = np.where(is_small, 1, _SMALL + 1).tolist()
        """Units that must be left over for a storage's block to be split."""
        large = config.large_segment_size // MIN_BLOCK
        whole = -(-units // (ROUND_LARGE // MIN_BLOCK)) * (ROUND_LARGE // MIN_BLOCK)
        is_large = units >= MIN_LARGE // MIN_BLOCK
        segments = np.where(is_small, SMALL_SEGMENT // MIN_BLOCK, np.where(is_large, whole, large))
        self._segment_sizes: list[int] = segments.tolist()
        self._starts: dict[int, int] = {}
        """Start of a free block -> its end."""
        self._ends: dict[int, int] = {}
        """End of a free block -> its start."""
        self._segments: dict[int, int] = {}
        """Start of a segment -> its end."""
        self._next = _FIRST
        self.missing: set[int] = set()
        """Storages that found no memory where they need not."""
        self._allocated = self._reserved = self._peak = 0

    @property
    def allocated(self) -> int:
        """Bytes of live blocks."""
        return self._allocated * MIN_BLOCK

    @property
    def peak_reserved(self) -> int:
        """The most that was reserved within the last ``run``, in bytes."""
        return self._peak * MIN_BLOCK

    def run(self, start: int, end: int, may_miss: frozenset[int] | None) -> tuple[np.ndarray, int | None]:
        """Runs the events from ``start`` to ``end``.

        Args:
            may_miss: storages that need not find memory; None: any of them.

        Returns: int64 (events,): bytes that are allocated behind each event; and the event that found no memory, where
        nothing more was run, or None.
        """
        kind, storage = self._trace.kind[start:end], self._trace.storage[start:end].astype(np.int64)
        codes = np.where(kind == ALLOCATE, storage, ~storage)
        breaks = [*np.flatnonzero(kind == EMPTY_CACHE).tolist(), len(codes)]
        self._peak = self._reserved
        begin, failed = 0, None
        for stop in breaks:
            missing = self._run_span(codes[begin:stop].tolist(), may_miss)
            if missing is not None:
                failed = begin + int(np.flatnonzero(codes[begin:stop] == missing)[0])
                break
            if stop < len(codes):
                self._empty_cache()
            begin = stop + 1
        done = slice(None, failed)
        blocks = np.where(kind[done] == EMPTY_CACHE, 0, np.array(self._blocks, np.int64)[storage[done]])
        live = self._allocated + np.cumsum(np.where(kind[done] == ALLOCATE, blocks, -blocks))
        self._allocated = int(live[-1]) if len(live) else self._allocated
        return live * MIN_BLOCK, None if failed is None else start + failed

    def _run_span(self, codes: list[int], may_miss: frozenset[int] | None) -> int | None:
        """Runs storages to allocate, and ~storages to free; gives the storage that found no memory."""
        sizes, blocks, places, least = self._sizes, self._blocks, self._places, self._least
        pool_of, starts, ends = self._pool_of, self._starts, self._ends
        end_at, start_at = ends.pop, starts.pop
        for code in codes:
            if code >= 0:
                size = sizes[code]
                if not size:
                    continue
                keys = pool_of[code]
                at = bisect_left(keys, size << SHIFT)
                if at < len(keys):
                    key = keys.pop(at)
                    start = key & _MASK
                    end = starts.pop(start)
                else:
                    taken = self._segment(self._segment_sizes[code])
                    if taken is None:
                        if may_miss is not None and code not in may_miss:
                            return code
                        places[code], blocks[code] = _NONE, 0
                        self.missing.add(code)
                        continue
                    start, end = taken
                places[code] = start
                behind = start + size
                rest = end - behind
                if rest >= least[code]:
                    starts[behind] = end
                    ends[end] = behind
                    insort(keys, rest << SHIFT | behind)
                else:
                    ends.pop(end, _NONE)
                    blocks[code] = end - start
                continue
            storage = ~code
            start = places[storage]
            if start == _NONE:
                continue
            keys = pool_of[storage]
            end = start + blocks[storage]
            before = end_at(start, None)
            if before is not None:
                del keys[bisect_left(keys, (start - before) << SHIFT | before)]
                start = before
            further = start_at(end, None)
            if further is not None:
                del keys[bisect_left(keys, (further - end) << SHIFT | end)]
                end = further
            ends[end] = start
            starts[start] = end
            insort(keys, (end - start) << SHIFT | start)
        return None

    def _segment(self, size: int) -> tuple[int, int] | None:
        """A new segment's start and end; what is cached is released where the device has no room. None: it has none."""
        if self._capacity is not None and self._reserved + size > self._capacity:
            self._empty_cache()
            if self._reserved + size > self._capacity:
                return None
        self._reserved += size
        self._peak = max(self._peak, self._reserved)
        if self._falls:
            self._next -= size + GAP
        start = self._next
        if not self._falls:
            self._next += size + GAP
        self._segments[start] = start + size
        return start, start + size

    def _empty_cache(self) -> None:
        """Releases every free block that is a whole segment."""
        for keys in self._pools.values():
            kept = []
            for key in keys:
                start = key & _MASK
                end = self._starts[start]
                if self._segments.get(start) != end:
                    kept.append(key)
                    continue
                del self._starts[start], self._ends[end], self._segments[start]
                self._reserved -= end - start
            keys[:] = kept
