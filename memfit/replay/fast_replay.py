"""One window replayed fast, as long as cached blocks serve all of it.

A window that frees all that it allocates, and for which the allocator has a free block at every request, leaves the
allocator as it was: free neighbours join at once, so that the free blocks after it are those before. Then nothing but
the block of each request is of interest. Free blocks are numbers (size and address) in sorted lists, the small and the
large pool run one after the other, and a block that is freed before the pool's next event is not even taken. Where a
request finds no block, this gives up, and ``memfit.replay.caching_allocator`` replays the window in full.

Most requests need no replay to be served. Free neighbours join at once, so that a request of s units finds none only
where what is alive leaves less than s in a row of every free block of s or more that the window began with. Live blocks
cut these B blocks, of T units, into at most as many gaps as there are live and free blocks together: with N alive, of
L units, T is then at most L + (N + B) (s - 1); and each of the B has one of the N in it. Behind the last request for
which neither is ruled out, and the last moment that may be a new peak, nothing is replayed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from memfit.events import ALLOCATE
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.block_pool import UNMAPPED, Block
from memfit.replay.caching_allocator import MIN_BLOCK, SMALL, CachingAllocator, round_size

SHIFT = 32
"""Bits of an address, in units of 512 bytes, in a free block's number."""
_MASK = (1 << SHIFT) - 1
_PAIR = 1 << 32
_STORAGE = _PAIR - 1
"""_PAIR is added to a storage that is freed before its pool's next event."""
MOST_CODES = 256
GAP = 1
"""Units between segments, so that no two of them touch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolEvents:
    """A pool's events in order; an allocation that is freed at once is one of them."""

    codes: list[int]
    """Storages to allocate, ~storages to free, and storages + _PAIR to allocate and free at once."""
    storage: np.ndarray
    position: np.ndarray
    """The position of each entry among the window's events."""
    added: np.ndarray
    """What each adds to the blocks that are alive: 1, -1 or 0."""
    asks: np.ndarray
    """Whether it needs a block."""


Codes = dict[bytes, list[PoolEvents]]
"""Events of the small and of the large pool, by which pool each storage is in."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FreeBlocks:
    """The free blocks of one pool, in units of 512 bytes."""

    keys: list[int]
    """size << SHIFT | address, sorted."""
    ends: dict[int, int]
    """End of a free block -> its start."""
    starts: dict[int, int]
    """Start of a free block -> its end."""
    least_rest: int
    """Units that must be left over for a block to be split."""
    tail: int
    """The end of the mapped part of an expandable segment; -1 where there is none."""
    sizes: np.ndarray
    """Units of each, sorted."""
    at_least: np.ndarray
    """Units of each and of all larger ones together; 0 behind the last."""


def can_run(config: AllocatorConfig) -> bool:
    """Whether the allocator's settings leave the choice of a block to best fit alone."""
    return config.max_split_size is None and config.garbage_collection_threshold == 0


def free_blocks(allocator: CachingAllocator) -> dict[bool, FreeBlocks]:
    """The free blocks of the default stream's small (True) and large pool."""
    shift: dict[int, int] = {}
    for number, segment in enumerate(allocator.segments()):
        shift.update(dict.fromkeys((block.addr for block in segment), number * GAP))
    origin = min(shift, default=0)
    by_pool = {}
    for small, pools in ((True, allocator._small), (False, allocator._large)):
        blocks: list[Block] = pools[0].blocks if 0 in pools else []
        spans = {(b.addr - origin) // MIN_BLOCK + shift[b.addr]: b.size // MIN_BLOCK for b in blocks}
        tails = [
            (b.addr - origin + b.size) // MIN_BLOCK + shift[b.addr]
            for b in blocks
            if b.next is not None and b.next.state == UNMAPPED
        ]
        fine = small or allocator.config.expandable_segments
        sizes = np.sort(np.array([*spans.values()], np.int64))
        by_pool[small] = FreeBlocks(
            keys=sorted(size << SHIFT | start for start, size in spans.items()),
            ends={start + size: start for start, size in spans.items()},
            starts={start: start + size for start, size in spans.items()},
            least_rest=1 if fine else SMALL // MIN_BLOCK + 1,
            tail=tails[0] if tails else -1,
            sizes=sizes,
            at_least=np.append(np.cumsum(sizes[::-1])[::-1], 0),
        )
    return by_pool


def rounded(nbytes: np.ndarray, config: AllocatorConfig) -> np.ndarray:
    """Units of 512 bytes of the block for each request; 0 for a request of nothing."""
    if max(config.roundup_power2_divisions) < 2:
        return (nbytes + (MIN_BLOCK - 1)) // MIN_BLOCK
    values, which = np.unique(nbytes, return_inverse=True)
    return np.array([round_size(int(v), config) // MIN_BLOCK if v else 0 for v in values], np.int64)[which]


def peak_if_served(
    kind: np.ndarray,
    storage: np.ndarray,
    units: np.ndarray,
    pools: dict[bool, FreeBlocks],
    codes: Codes,
    beaten: int = -1,
) -> int | None:
    """Bytes that the window adds to what is allocated, at its peak; None where a request finds no block.

    Args:
        kind, storage: the window's events; every storage that is allocated is freed, and no other.
        units: of each storage, ``rounded``.
        codes: kept from one window of this layout to the next.
        beaten: a peak that is no more than this need not be exact: it may be told too low.
    """
    block_bytes = units.tolist()
    pool_of = np.where(units > SMALL // MIN_BLOCK, 2, units > 0)
    key = pool_of.tobytes()
    if key not in codes:
        if len(codes) >= MOST_CODES:
            codes.clear()
        of_event = pool_of[storage]
        codes[key] = [_coded(kind, storage, np.flatnonzero(of_event == pool)) for pool in (1, 2)]
    most = units + np.where(pool_of == 2, pools[False].least_rest - 1, 0)
    alive = np.cumsum(np.where(kind == ALLOCATE, most[storage], -most[storage]))
    peaks = np.flatnonzero(alive * MIN_BLOCK > beaten)
    for small, own in zip((True, False), codes[key], strict=True):
        until = _last_in_doubt(pools[small], own, units)
        if len(peaks) and pools[small].least_rest > 1:
            until = max(until, int(np.searchsorted(own.position, peaks[-1], side="right")))
        if not _serve(pools[small], own.codes[:until], block_bytes):
            return None
    blocks = np.array(block_bytes, np.int64)[storage]
    live = np.cumsum(np.where(kind == ALLOCATE, blocks, -blocks))
    return int(live.max(initial=0)) * MIN_BLOCK


def _last_in_doubt(pool: FreeBlocks, events: PoolEvents, units: np.ndarray) -> int:
    """Events up to the last request that may find no block."""
    if not len(events.codes):
        return 0
    asked = units[events.storage]
    count = np.cumsum(events.added) - events.added
    added = events.added * (asked + (pool.least_rest - 1))
    alive = np.cumsum(added) - added
    larger = np.searchsorted(pool.sizes, asked)
    blocks, total = len(pool.sizes) - larger, pool.at_least[larger]
    sure = (blocks > count) | (total > alive + (count + blocks) * (asked - 1))
    doubtful = np.flatnonzero(events.asks & ~sure)
    return int(doubtful[-1]) + 1 if len(doubtful) else 0


def _coded(kind: np.ndarray, storage: np.ndarray, position: np.ndarray) -> PoolEvents:
    """The window's events at these positions."""
    kind, storage = kind[position], storage[position]
    codes = np.where(kind == ALLOCATE, storage, ~storage)
    pair = np.zeros(len(codes), bool)
    if len(codes) > 1:
        pair[:-1] = (codes[:-1] >= 0) & (codes[1:] == ~codes[:-1])
    second = np.zeros_like(pair)
    second[1:] = pair[:-1]
    added = np.where(pair, 0, np.where(kind == ALLOCATE, 1, -1))
    return PoolEvents(
        codes=np.where(pair, codes + _PAIR, codes)[~second].tolist(),
        storage=storage[~second],
        position=position[~second],
        added=added[~second],
        asks=(kind == ALLOCATE)[~second],
    )


def _serve(pool: FreeBlocks, codes: list[int], served: list[int]) -> bool:
    """Runs a pool's events; ``taken`` gets the units of blocks that are larger than asked for."""
    keys, ends, starts = pool.keys.copy(), pool.ends.copy(), pool.starts.copy()
    least, tail = pool.least_rest, pool.tail
    place = [0] * len(served)
    find, insert, end_at, start_at = bisect_left, insort, ends.pop, starts.pop
    for code in codes:
        if code < 0:
            start = place[~code]
            end = start + served[~code]
            before = end_at(start, None)
            if before is not None:
                del keys[find(keys, (start - before) << SHIFT | before)]
                start = before
            behind = start_at(end, None)
            if behind is not None:
                del keys[find(keys, (behind - end) << SHIFT | end)]
                end = behind
            ends[end] = start
            starts[start] = end
            insert(keys, (end - start) << SHIFT | start)
            continue
        storage = code & _STORAGE
        size = served[storage]
        at = find(keys, size << SHIFT)
        if at == len(keys):
            return False
        key = keys[at]
        if tail >= 0 and at + 1 < len(keys) and (key & _MASK) + (key >> SHIFT) == tail:
            at += 1
            key = keys[at]
        block_bytes = key >> SHIFT
        rest = block_bytes - size
        if rest < least:
            served[storage] = block_bytes
        if code != storage:
            continue
        start = key & _MASK
        del keys[at]
        place[storage] = start
        if rest >= least:
            end = start + block_bytes
            del starts[start]
            start += size
            insert(keys, rest << SHIFT | start)
            ends[end] = start
            starts[start] = end
        else:
            del ends[start + block_bytes], starts[start]
    return True
