"""CachingAllocator: PyTorch's CUDA caching allocator, replayed in addresses without a card.

Source: c10/cuda/CUDACachingAllocator.cpp (malloc, get_free_block, alloc_block, free_block, should_split,
garbage_collect_cached_blocks, release_available_cached_blocks, release_cached_blocks) and c10/core/AllocatorConfig.h of
torch 2.13.0. A block that another stream used (``record_stream``) is freed with ``awaits_event``: it comes back when
the event is over, or when a request fails and waits for it. As in PyTorch, that request then asks the device alone and
not the pool, so that it can fail although the block would hold it (pytorch/pytorch issue 189504). Of free blocks of
equal size the one with the lowest address is taken: see ``AllocatorConfig.youngest_first``. Left out: CUDA graphs'
private pools and user memory pools.
"""

from __future__ import annotations

from bisect import bisect_left

from memfit.replay import expandable_segments
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.block_pool import ADDRESS_BITS, FREE, LIVE, UNMAPPED, Block, DeviceMemory, History, Pool
from memfit.replay.errors import OutOfMemory

MIN_BLOCK = 512
SMALL = 1 << 20
"""The largest request of the small pool."""
SMALL_SEGMENT = 2 << 20
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20


class CachingAllocator:
    """The CUDA caching allocator of one device: blocks cached by pool and stream, split, merged, released on failure.

    Args:
        capacity: bytes that the device can hand out (None: no limit). A request that they cannot hold, after every
            release, raises OutOfMemory.
        config: the allocator's settings.
        allowed: the further limit that a memory fraction sets, ``config.allowed_bytes(total memory of the card)``.
            Where it is None, PyTorch does not collect garbage, whatever the threshold.
        history: a list that receives each event, for a snapshot.
    """

    def __init__(
        self,
        capacity: int | None = None,
        config: AllocatorConfig | None = None,
        *,
        allowed: int | None = None,
        history: History | None = None,
    ) -> None:
        self.config = config = config or AllocatorConfig()
        self.allowed, self.history = allowed, history
        self.allocated = self.requested = self.retries = 0
        """Bytes of live blocks; bytes asked for in them; times that the cache was released for a request."""
        self.peak_allocated = self.peak_requested = 0
        self._memory = DeviceMemory(capacity, falls=config.youngest_first)
        self._live: dict[int, Block | None] = {}
        self._awaiting: list[int] = []
        """Freed storages whose blocks another stream still uses, in order."""
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._searches = ([0], [0])
        self._collects = config.garbage_collection_threshold > 0 and allowed is not None
        self._first_fits = not (config.expandable_segments or config.max_split_size or self._collects)
        self._rounds_512 = max(config.roundup_power2_divisions) < 2

    @property
    def reserved(self) -> int:
        """Bytes held from the device."""
        return self._memory.reserved

    @property
    def peak_reserved(self) -> int:
        return self._memory.peak

    @property
    def capacity(self) -> int | None:
        return self._memory.capacity

    @property
    def is_plain(self) -> bool:
        """Whether the smallest free block that is large enough is taken, none is collected and no event is noted."""
        return self._first_fits and self.allowed is None and self.history is None

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_requested = self.allocated, self.requested
        self._memory.peak = self._memory.reserved

    def malloc(self, storage: int, nbytes: int, stream: int = 0) -> None:
        """Allocates ``nbytes`` for a storage, which is freed by the same number.

        Raises:
            OutOfMemory: nothing was allocated; the cache was released.
        """
        if nbytes == 0:
            self._live[storage] = None
            return
        size = (nbytes + 511) & -512 if self._rounds_512 else round_size(nbytes, self.config)
        pool = (self._small if size <= SMALL else self._large).get(stream)
        if pool is None:
            pool = self._new_pool(size <= SMALL, stream)
        at = bisect_left(pool.keys, size << ADDRESS_BITS) if self._first_fits else self._best_fit(pool, size)
        if at < len(pool.keys):
            del pool.keys[at]
            block = pool.blocks.pop(at)
        else:
            block = self._obtain(pool, size, nbytes)
        rest = block.size - size
        if rest >= pool.least_rest and (
            pool.is_small or self._first_fits or self.config.expandable_segments or self._may_split(size)
        ):
            behind, block = block, Block(pool, block.addr, size)
            block.range = behind.range
            before = block.prev = behind.prev
            if before is not None:
                before.next = block
            block.next, behind.prev = behind, block
            behind.addr += size
            behind.size = rest
            key = rest << ADDRESS_BITS | behind.addr
            at = bisect_left(pool.keys, key)
            pool.keys.insert(at, key)
            pool.blocks.insert(at, behind)
            behind.born = pool.searches[0]
        block.state, block.requested, block.storage = LIVE, nbytes, storage
        self._live[storage] = block
        self.allocated = allocated = self.allocated + block.size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        self.requested = requested = self.requested + nbytes
        if requested > self.peak_requested:
            self.peak_requested = requested
        if self.history is not None:
            self.history.append(("alloc", block.addr, nbytes, stream, storage))

    def process_events(self) -> None:
        """Every event that a freed block awaits is over: the blocks return to their pools."""
        awaiting, self._awaiting = self._awaiting, []
        for storage in awaiting:
            self.free(storage)

    def free(self, storage: int, *, awaits_event: bool = False) -> None:
        """Returns a storage's block to its pool, joined with its free neighbours; see ``process_events``."""
        if awaits_event:
            self._awaiting.append(storage)
            return
        block = self._live.pop(storage)
        if block is None:
            return
        pool = block.pool
        self.allocated -= block.size
        self.requested -= block.requested
        if self.history is not None:
            self.history.append(("free", block.addr, block.requested, pool.stream, storage))
        keys, blocks = pool.keys, pool.blocks
        before, behind = block.prev, block.next
        if before is not None and before.state == FREE:
            at = bisect_left(keys, before.size << ADDRESS_BITS | before.addr)
            del keys[at], blocks[at]
            block.addr = before.addr
            block.size += before.size
            block.prev = further = before.prev
            if further is not None:
                further.next = block
        if behind is not None and behind.state == FREE:
            at = bisect_left(keys, behind.size << ADDRESS_BITS | behind.addr)
            del keys[at], blocks[at]
            block.size += behind.size
            block.next = further = behind.next
            if further is not None:
                further.prev = block
        block.state = FREE
        key = block.size << ADDRESS_BITS | block.addr
        at = bisect_left(keys, key)
        keys.insert(at, key)
        blocks.insert(at, block)
        block.born = pool.searches[0]

    def address(self, storage: int) -> int:
        """Where a live storage lies; 0 where it holds nothing."""
        block = self._live[storage]
        return 0 if block is None else block.addr

    def empty_cache(self) -> None:
        """Releases every free block that is a whole segment, and every whole free page of an expandable one."""
        for pools in (self._large, self._small):
            for stream in sorted(pools):
                for block in list(pools[stream].blocks):
                    if block.range is not None:
                        expandable_segments.unmap(self._memory, block, self.history)
                    elif block.is_segment:
                        self._release(block)

    def segments(self) -> list[list[Block]]:
        """The mapped blocks of each segment, by address; an expandable segment gives one list for each mapped run."""
        pools = [*self._small.values(), *self._large.values()]
        known = [block for pool in pools for block in pool.blocks] + [b for b in self._live.values() if b is not None]
        heads = [block for block in known if block.prev is None or block.prev.state == UNMAPPED]
        runs = []
        for head in sorted(heads, key=lambda block: block.addr):
            run, block = [], head
            while block is not None and block.state != UNMAPPED:
                run.append(block)
                block = block.next  # type: ignore[assignment]
            runs.append(run)
        return runs

    def _new_pool(self, is_small: bool, stream: int) -> Pool:
        fine = is_small or self.config.expandable_segments
        pool = Pool(
            is_small=is_small,
            stream=stream,
            least_rest=MIN_BLOCK if fine else SMALL + 1,
            searches=self._searches[is_small],
        )
        (self._small if is_small else self._large)[stream] = pool
        return pool

    def _may_split(self, size: int) -> bool:
        return self.config.max_split_size is None or size < self.config.max_split_size

    def _best_fit(self, pool: Pool, size: int) -> int:
        """The index of the free block to take, under every setting; past the end where none may be taken."""
        if self._collects:
            pool.searches[0] += 1
        blocks, none = pool.blocks, len(pool.blocks)
        at = bisect_left(pool.keys, size << ADDRESS_BITS)
        if at == none:
            return none
        if self.config.expandable_segments:
            while at + 1 < none and _room(blocks[at + 1]) < _room(blocks[at]):
                at += 1
        limit = self.config.max_split_size
        if limit is not None:
            block_bytes = blocks[at].size
            if size < limit <= block_bytes or (
                size >= limit and block_bytes >= size + self.config.max_non_split_rounding
            ):
                return none
        return at

    def _obtain(self, pool: Pool, size: int, nbytes: int) -> Block:
        """A block of new memory, in no list; what is cached is released where the device has none."""
        if self._collects:
            self._collect_garbage()
        segment = segment_size(size, self.config)
        block = self._reserve(pool, size, segment)
        if block is None and self._release_oversize(pool, size):
            block = self._reserve(pool, size, segment)
        awaited = bool(self._awaiting)
        if block is None:
            self.process_events()
            self.empty_cache()
            self.retries += 1
            block = self._reserve(pool, size, segment)
        if block is None:
            limits = [limit for limit in (self.capacity, self.allowed) if limit is not None]
            if self.history is not None:
                self.history.append(("oom", min(limits) - self.reserved, size, pool.stream, -1))
            raise OutOfMemory(
                nbytes, segment=segment, allocated=self.allocated, reserved=self.reserved, limit=min(limits),
                retry_succeeds=awaited and self._best_fit(pool, size) < len(pool.keys),
            )  # fmt: skip
        return block

    def _reserve(self, pool: Pool, size: int, segment: int) -> Block | None:
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self.config.expandable_segments:
            page = SMALL_SEGMENT if pool.is_small else self.config.large_segment_size
            return expandable_segments.allocate(self._memory, pool, size, page, self.history)
        if not self._memory.take(segment):
            return None
        block = Block(pool, self._memory.addresses(segment), segment)
        if self.history is not None:
            self.history.append(("segment_alloc", block.addr, segment, pool.stream, -1))
        return block

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._memory.give(block.size)
        if self.history is not None:
            self.history.append(("segment_free", block.addr, block.size, block.pool.stream, -1))

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With max_split_size: the smallest free block that would do, or the largest ones until they add up."""
        limit = self.config.max_split_size
        if limit is None:
            return False
        want = max(size, limit)
        at = bisect_left(pool.keys, want << ADDRESS_BITS)
        if at < len(pool.blocks) and pool.blocks[at].range is None:
            self._release(pool.blocks[at])
            return True
        released = 0
        for block in reversed(pool.blocks[:at]):
            if released >= want or block.size < limit:
                break
            if block.range is None:
                released += block.size
                self._release(block)
        return released >= want

    def _collect_garbage(self) -> None:
        """Past the threshold: releases large segments not used for longer than the mean, again while that helps."""
        assert self.allowed is not None
        excess = self.reserved - int(self.config.garbage_collection_threshold * self.allowed)
        if excess <= 0:
            return
        clock = self._searches[False][0]
        old = [
            b for stream in sorted(self._large) for b in self._large[stream].blocks if b.is_segment and b.range is None
        ]
        reclaimed, released = 0, True
        while reclaimed < excess and released and old:
            mean = sum(clock - block.born for block in old) / len(old)
            going = [block for block in old if clock - block.born >= mean]
            old = [block for block in old if clock - block.born < mean]
            released = bool(going)
            for block in going:
                reclaimed += block.size
                self._release(block)


def round_size(nbytes: int, config: AllocatorConfig) -> int:
    """The size of the block for a request: multiples of 512 bytes, or steps between powers of two."""
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    divisions = config.roundup_power2_divisions[min(max(nbytes.bit_length() - 21, 0), 15)]
    if divisions > 1 and nbytes > MIN_BLOCK * divisions:
        step = (1 << nbytes.bit_length() - 1) // divisions
        return -(-nbytes // step) * step
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int, config: AllocatorConfig) -> int:
    """Bytes asked of the device for a block of ``size`` bytes, without expandable segments."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return config.large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def _room(block: Block) -> int:
    """A free block's size, with the unmapped room behind it."""
    behind = block.next
    return block.size + (behind.size if behind is not None and behind.state == UNMAPPED else 0)
