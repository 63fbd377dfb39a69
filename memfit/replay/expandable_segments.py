"""expandable_segments: one range of addresses for each pool and stream, into which pages are mapped as they are needed.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (find_expandable_block, map_block, unmap_block).
Left out: sharing between processes and peers' mappings, which reserve nothing more.
"""

from __future__ import annotations

from bisect import bisect_left

from memfit.replay.block_pool import FREE, LIVE, UNMAPPED, Block, DeviceMemory, History, Pool, Range

NO_LIMIT = 1 << 40
"""Addresses reserved where the device's memory has no limit; with one, 9/8 of it, as PyTorch does, or the request."""


def allocate(memory: DeviceMemory, pool: Pool, size: int, page: int, history: History | None) -> Block | None:
    """A free block of at least ``size`` bytes, out of its pool's list; None where the device has no pages left."""
    block = _lowest_room(memory, pool, size, page)
    if block.state == UNMAPPED and not _map(memory, block, min(block.size, size), history):
        return None
    while block.size < size:
        unmapped = block.next
        assert unmapped is not None
        if not _map(memory, unmapped, min(size - block.size, unmapped.size), history):
            return None
        block = unmapped
    pool.remove(block)
    return block


def unmap(memory: DeviceMemory, block: Block, history: History | None) -> None:
    """Gives back the whole pages inside a free block; the rest of it stays free before and behind them."""
    pool, segment = block.pool, block.range
    assert segment is not None
    begin = segment.addr + -(-(block.addr - segment.addr) // segment.page) * segment.page
    end = segment.addr + (block.addr + block.size - segment.addr) // segment.page * segment.page
    if begin >= end:
        return
    pool.remove(block)
    if begin > block.addr:
        before = _neighbour(block, block.addr, begin - block.addr, FREE)
        before.prev, before.next = block.prev, block
        if block.prev is not None:
            block.prev.next = before
        block.prev = before
        pool.insert(before)
    if block.addr + block.size > end:
        pool.insert(_behind(block, end, block.addr + block.size - end, FREE))
    block.addr, block.size, block.state = begin, end - begin, UNMAPPED
    memory.give(end - begin)
    if history is not None:
        history.append(("segment_unmap", begin, end - begin, pool.stream, -1))
    merge(block)
    if block.size == segment.size:
        return
    pool.unmapped.insert(bisect_left(pool.unmapped, block.addr, key=_address), block)


def merge(block: Block) -> None:
    """Joins a block (in no list) with its neighbours of the same state, which leave their lists."""
    before, behind = block.prev, block.next
    if before is not None and before.state == block.state:
        _leave(before)
        block.addr = before.addr
        block.size += before.size
        block.prev = before.prev
        if block.prev is not None:
            block.prev.next = block
    if behind is not None and behind.state == block.state:
        _leave(behind)
        block.size += behind.size
        block.next = behind.next
        if block.next is not None:
            block.next.prev = block


def _lowest_room(memory: DeviceMemory, pool: Pool, size: int, page: int) -> Block:
    """The first block, by address, of a run of free and unmapped ones with room; a new range where there is none."""
    for unmapped in pool.unmapped:
        before = unmapped.prev
        first = before if before is not None and before.state != LIVE else unmapped
        room = 0
        at: Block | None = first
        while room < size and at is not None and at.state != LIVE:
            room += at.size
            at = at.next
        if room >= size:
            return first
    total = NO_LIMIT if memory.capacity is None else memory.capacity
    nbytes = -(-max(total + total // 8, size) // page) * page
    block = Block(pool, memory.addresses(nbytes), nbytes, UNMAPPED)
    block.range = Range(block.addr, nbytes, page)
    pool.unmapped.insert(bisect_left(pool.unmapped, block.addr, key=_address), block)
    return block


def _map(memory: DeviceMemory, block: Block, size: int, history: History | None) -> bool:
    """Maps the pages of an unmapped block that ``size`` bytes from its start touch; the block becomes free."""
    pool, segment = block.pool, block.range
    assert segment is not None
    mapped = -(-size // segment.page) * segment.page
    if not memory.take(mapped):
        return False
    _leave(block)
    if mapped < block.size:
        rest = _behind(block, block.addr + mapped, block.size - mapped, UNMAPPED)
        pool.unmapped.insert(bisect_left(pool.unmapped, rest.addr, key=_address), rest)
        block.size = mapped
    if history is not None:
        history.append(("segment_map", block.addr, mapped, pool.stream, -1))
    block.state = FREE
    merge(block)
    pool.insert(block)
    return True


def _leave(block: Block) -> None:
    if block.state == FREE:
        block.pool.remove(block)
    else:
        del block.pool.unmapped[bisect_left(block.pool.unmapped, block.addr, key=_address)]


def _behind(block: Block, addr: int, size: int, state: int) -> Block:
    new = _neighbour(block, addr, size, state)
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new
    return new


def _neighbour(block: Block, addr: int, size: int, state: int) -> Block:
    new = Block(block.pool, addr, size, state)
    new.range = block.range
    return new


def _address(block: Block) -> int:
    return block.addr
