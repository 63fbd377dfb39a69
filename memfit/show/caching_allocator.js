"use strict";
/* PyTorch's caching allocator under its default settings, as memfit/replay/caching_allocator.py replays it, and the peaks
   of a step's phases, as memfit/replay/replay.py reads them. Every number is a whole number below 2^53: memfit derives no
   step whose storages together reach half of that. */

const MIN_BLOCK = 512, SMALL = 1 << 20, SMALL_SEGMENT = 2 << 20, MIN_LARGE = 10 << 20, LARGE_SEGMENT = 20 << 20, ROUND_LARGE = 2 << 20;

class OutOfMemory extends Error {}

class CachingAllocator {
  /** capacity: bytes that the device can hand out; Infinity: no limit. */
  constructor(capacity) {
    this.capacity = capacity;
    this.allocated = this.reserved = this.nextAddress = 0;
    this.live = new Map();
    this.pools = new Map();
  }

  malloc(storage, nbytes, stream) {
    if (nbytes === 0) { this.live.set(storage, null); return; }
    const size = Math.ceil(nbytes / MIN_BLOCK) * MIN_BLOCK;
    const pool = this.poolOf(size <= SMALL, stream);
    const at = position(pool.free, size, -1);
    let block = at < pool.free.length ? pool.free.splice(at, 1)[0] : this.obtain(pool, size);
    const rest = block.size - size;
    if (rest >= pool.leastRest) {
      const behind = block;
      block = { pool, address: behind.address, size, previous: behind.previous, next: behind, isFree: false };
      if (block.previous !== null) block.previous.next = block;
      behind.previous = block;
      behind.address += size;
      behind.size = rest;
      behind.isFree = true;
      insert(pool.free, behind);
    }
    block.isFree = false;
    this.live.set(storage, block);
    this.allocated += block.size;
  }

  free(storage) {
    const block = this.live.get(storage);
    this.live.delete(storage);
    if (block === null) return;
    this.allocated -= block.size;
    const free = block.pool.free, { previous, next } = block;
    if (previous !== null && previous.isFree) {
      remove(free, previous);
      block.address = previous.address;
      block.size += previous.size;
      block.previous = previous.previous;
      if (block.previous !== null) block.previous.next = block;
    }
    if (next !== null && next.isFree) {
      remove(free, next);
      block.size += next.size;
      block.next = next.next;
      if (block.next !== null) block.next.previous = block;
    }
    block.isFree = true;
    insert(free, block);
  }

  /** Gives back every free block that is a whole segment. */
  emptyCache() {
    for (const pool of this.pools.values()) {
      pool.free = pool.free.filter((block) => {
        const isSegment = block.previous === null && block.next === null;
        if (isSegment) this.reserved -= block.size;
        return !isSegment;
      });
    }
  }

  poolOf(isSmall, stream) {
    const key = 2 * stream + (isSmall ? 1 : 0);
    if (!this.pools.has(key)) this.pools.set(key, { free: [], leastRest: isSmall ? MIN_BLOCK : SMALL + 1 });
    return this.pools.get(key);
  }

  obtain(pool, size) {
    const segment = size <= SMALL ? SMALL_SEGMENT : size < MIN_LARGE ? LARGE_SEGMENT : Math.ceil(size / ROUND_LARGE) * ROUND_LARGE;
    if (this.reserved + segment > this.capacity) this.emptyCache();
    if (this.reserved + segment > this.capacity) throw new OutOfMemory();
    this.reserved += segment;
    const block = { pool, address: this.nextAddress, size: segment, previous: null, next: null, isFree: false };
    this.nextAddress += segment;
    return block;
  }
}

/** The place of the first free block that is larger, or as large and not before an address. */
function position(free, size, address) {
  let low = 0, high = free.length;
  while (low < high) {
    const middle = (low + high) >> 1, block = free[middle];
    if (block.size < size || (block.size === size && block.address < address)) low = middle + 1;
    else high = middle;
  }
  return low;
}

function insert(free, block) { free.splice(position(free, block.size, block.address), 0, block); }
function remove(free, block) { free.splice(position(free, block.size, block.address), 1); }

/** Peaks by phase of a step's events; {failed: {bytes, phase, event}} where a request finds no memory.
    codes: for each event, storage + 1 where it is allocated, -(storage + 1) where it is freed, 0 where the cache is emptied. */
function peaksOf(step, nbytes, capacity) {
  const allocator = new CachingAllocator(capacity), peaks = new Map();
  const optional = new Set(step.optional), missing = new Set();
  for (const [name, start, end] of step.phases) {
    if (!peaks.has(name)) peaks.set(name, { allocated: 0, reserved: 0, event: -1, largest: 0, largestEvent: 0 });
    const peak = peaks.get(name);
    if (allocator.allocated > peak.allocated) { peak.allocated = allocator.allocated; peak.event = start - 1; }
    peak.reserved = Math.max(peak.reserved, allocator.reserved);
    for (let event = start; event < end; event++) {
      const code = step.codes[event];
      if (code > 0) {
        const storage = code - 1;
        try {
          allocator.malloc(storage, nbytes[storage], step.streams === null ? 0 : step.streams[storage]);
        } catch (error) {
          if (!(error instanceof OutOfMemory)) throw error;
          if (!optional.has(storage)) return { failed: { bytes: nbytes[storage], phase: name, event } };
          missing.add(storage);
          continue;
        }
        if (allocator.allocated > peak.allocated) { peak.allocated = allocator.allocated; peak.event = event; }
        if (allocator.reserved > peak.reserved) peak.reserved = allocator.reserved;
        if (nbytes[storage] >= peak.largest) { peak.largest = nbytes[storage]; peak.largestEvent = event; }
      } else if (code < 0) {
        if (!missing.has(-code - 1)) allocator.free(-code - 1);
      }
      else allocator.emptyCache();
    }
  }
  return { peaks: withoutSmallSetup(peaks) };
}

/** Setup is a phase of its own where building the nets needs more than training them; else it is part of that. */
function withoutSmallSetup(peaks) {
  const setup = peaks.get("setup"), train = peaks.get("train");
  if (setup === undefined || train === undefined || setup.allocated > train.allocated) return peaks;
  train.reserved = Math.max(train.reserved, setup.reserved);
  if (setup.largest > train.largest || (setup.largest === train.largest && setup.largestEvent > train.largestEvent)) {
    train.largest = setup.largest;
    train.largestEvent = setup.largestEvent;
  }
  peaks.delete("setup");
  return peaks;
}
