"""What the caching allocator is made of: device memory, blocks, and the free blocks of one pool and stream."""

from __future__ import annotations

from bisect import bisect_left

FREE, LIVE, UNMAPPED = 0, 1, 2
"""States of a block. UNMAPPED: addresses of an expandable segment without memory behind them."""
ADDRESS_BITS = 48
FIRST_ADDRESS = 0x7F00_0000_0000
PAGE = 2 << 20

History = list[tuple[str, int, int, int, int]]
"""(action, address, bytes, stream, storage or -1). Actions: alloc, free, segment_alloc, segment_free, segment_map,
segment_unmap and oom, whose address column holds the device's free bytes."""


class Block:
    """A run of addresses inside a segment; prev and next are its neighbours there."""

    __slots__ = ("addr", "born", "next", "pool", "prev", "range", "requested", "size", "state", "storage")

    def __init__(self, pool: Pool, addr: int, size: int, state: int = FREE) -> None:
        self.pool, self.addr, self.size, self.state = pool, addr, size, state
        self.requested = self.born = 0
        self.storage = -1
        self.prev: Block | None = None
        self.next: Block | None = None
        self.range: Range | None = None

    @property
    def is_segment(self) -> bool:
        """The block is its whole segment."""
        return self.prev is None and self.next is None


class Range:
    """The reserved addresses of an expandable segment, of which pages are mapped and unmapped."""

    __slots__ = ("addr", "page", "size")

    def __init__(self, addr: int, size: int, page: int) -> None:
        self.addr, self.size, self.page = addr, size, page


class Pool:
    """Free blocks of one size class and stream, ordered by (size, address); unmapped ones by address."""

    __slots__ = ("blocks", "is_small", "keys", "least_rest", "searches", "stream", "unmapped")

    def __init__(self, *, is_small: bool, stream: int, least_rest: int, searches: list[int]) -> None:
        self.is_small, self.stream, self.least_rest = is_small, stream, least_rest
        self.keys: list[int] = []
        """size << ADDRESS_BITS | address of each of ``blocks``."""
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []
        self.searches = searches
        """One number, shared by all streams' pools of this size class: searches done, the clock of a block's age."""

    def insert(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.addr
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)
        block.born = self.searches[0]

    def remove(self, block: Block) -> None:
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.addr)
        del self.keys[at], self.blocks[at]


class DeviceMemory:
    """Bytes and addresses of a device. The addresses of a released segment do not come back.

    Args:
        falls: each segment lies below the ones before, as a driver for Linux places them: in published snapshots of an
            RTX 3090 a later segment ends where an earlier one begins. Otherwise it lies above. The address decides
            which of two free blocks of one size is taken (``AllocatorConfig.youngest_first``).
    """

    def __init__(self, capacity: int | None, *, falls: bool = False) -> None:
        self.capacity, self._falls = capacity, falls
        self.reserved = self.peak = 0
        self._next = FIRST_ADDRESS

    def take(self, nbytes: int) -> bool:
        """Counts bytes as reserved, if the device has them."""
        reserved = self.reserved + nbytes
        if self.capacity is not None and reserved > self.capacity:
            return False
        self.reserved = reserved
        if reserved > self.peak:
            self.peak = reserved
        return True

    def give(self, nbytes: int) -> None:
        self.reserved -= nbytes

    def addresses(self, nbytes: int) -> int:
        """The first of a run of addresses, aligned to PAGE."""
        pages = -(-nbytes // PAGE) * PAGE
        first = self._next - pages if self._falls else self._next
        self._next = first if self._falls else first + pages
        return first
