"""What must hold of the caching allocator under every setting, capacity and order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.block_pool import FREE, LIVE, UNMAPPED
from memfit.replay.caching_allocator import CachingAllocator, round_size
from memfit.replay.cpu_allocator import CpuAllocator
from memfit.replay.errors import OutOfMemory

MIB = 1 << 20
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "garbage_collection_threshold:0.6",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:32",
    "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:8",
)
Op = tuple[str, int, int, int]
"""("malloc", storage, bytes, stream), ("free", storage, 0, 0) or ("empty", 0, 0, 0)."""

sizes = st.one_of(
    st.integers(0, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(1, 40).map(lambda n: n * MIB)
)


@st.composite
def traces(draw: st.DrawFn) -> list[Op]:
    ops: list[Op] = []
    live: list[int] = []
    for storage, (roll, nbytes, stream, pick) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 19), sizes, st.integers(0, 1), st.integers(0, 99)), max_size=60))
    ):
        if roll == 0:
            ops.append(("empty", 0, 0, 0))
        elif roll < 9 and live:
            ops.append(("free", live.pop(pick % len(live)), 0, 0))
        else:
            ops.append(("malloc", storage, nbytes, stream))
            live.append(storage)
    return ops


def apply(allocator: CachingAllocator | CpuAllocator, op: Op) -> None:
    if op[0] == "malloc":
        allocator.malloc(*op[1:])
    elif op[0] == "free":
        allocator.free(op[1])
    else:
        allocator.empty_cache()


def failure_of(allocator: CachingAllocator, op: Op) -> OutOfMemory | None:
    try:
        apply(allocator, op)
    except OutOfMemory as error:
        return error
    return None


def fits(ops: list[Op], capacity: int | None, settings: str) -> bool:
    allocator = CachingAllocator(capacity, AllocatorConfig.parse(settings))
    return not any(failure_of(allocator, op) for op in ops)


def check(allocator: CachingAllocator, live: dict[int, int], limit: int | None) -> None:
    """Blocks tile their segments, segments are apart, and every byte is accounted for."""
    end, mapped, in_use = 0, 0, 0
    for run in allocator.segments():
        for before, block in zip([None, *run], run, strict=False):
            assert block.addr >= end, "blocks and segments do not overlap"
            assert before is None or (block.prev is before and before.next is block and block.addr == end)
            assert before is None or not before.state == block.state == FREE, "free neighbours are merged"
            end = block.addr + block.size
            mapped += block.size
            assert block.state != UNMAPPED
            if block.state == LIVE:
                in_use += block.size
                assert block.addr == allocator.address(block.storage)
                assert block.requested == live[block.storage] <= block.size
    assert (mapped, in_use) == (allocator.reserved, allocator.allocated)
    assert sum(live.values()) == allocator.requested <= allocator.allocated <= allocator.reserved
    assert limit is None or allocator.reserved <= limit
    assert allocator.reserved <= allocator.peak_reserved
    assert allocator.allocated <= allocator.peak_allocated


@given(ops=traces(), settings=st.sampled_from(SETTINGS), capacity=st.one_of(st.none(), st.integers(1, 200 * MIB)))
def test_blocks_never_overlap_and_all_bytes_are_accounted_for(
    ops: list[Op], settings: str, capacity: int | None
) -> None:
    config = AllocatorConfig.parse(settings)
    allowed = capacity if config.garbage_collection_threshold else None
    allocator, live = CachingAllocator(capacity, config, allowed=allowed), dict[int, int]()
    for op in ops:
        if op[0] == "free" and op[1] not in live:
            continue
        if failure := failure_of(allocator, op):
            assert failure.reserved + failure.segment > failure.limit or config.expandable_segments
        elif op[0] == "malloc":
            live[op[1]] = op[2]
        elif op[0] == "free":
            del live[op[1]]
        check(allocator, live, capacity)
    for storage in list(live):
        allocator.free(storage)
    allocator.empty_cache()
    assert (allocator.requested, allocator.allocated, allocator.reserved, allocator.segments()) == (0, 0, 0, [])


@given(ops=traces(), settings=st.sampled_from(SETTINGS), capacity=st.integers(1, 200 * MIB))
def test_the_same_events_give_the_same_history(ops: list[Op], settings: str, capacity: int) -> None:
    histories = []
    for _ in range(2):
        allocator = CachingAllocator(capacity, AllocatorConfig.parse(settings), history=[])
        any(failure_of(allocator, op) for op in ops)
        histories.append(allocator.history)
    assert histories[0] == histories[1]


@given(ops=traces(), settings=st.sampled_from(SETTINGS), more=st.integers(0, 300 * MIB))
def test_from_the_unlimited_peak_on_everything_fits_in_the_same_way(ops: list[Op], settings: str, more: int) -> None:
    unlimited = CachingAllocator(None, AllocatorConfig.parse(settings))
    for op in ops:
        apply(unlimited, op)
    limited = CachingAllocator(unlimited.peak_reserved + more, AllocatorConfig.parse(settings))
    for op in ops:
        apply(limited, op)
    assert limited.retries == 0
    assert (limited.peak_allocated, limited.peak_reserved) == (unlimited.peak_allocated, unlimited.peak_reserved)


@given(ops=traces(), settings=st.sampled_from(SETTINGS), less=st.integers(1, 40 * MIB))
def test_under_the_peak_of_the_rounded_requests_nothing_fits(ops: list[Op], settings: str, less: int) -> None:
    config, needed = AllocatorConfig.parse(settings), CpuAllocator()
    for name, storage, nbytes, stream in ops:
        apply(needed, (name, storage, round_size(nbytes, config) if nbytes else 0, stream))
    if needed.peak_allocated > less:
        assert not fits(ops, needed.peak_allocated - less, settings)


def mallocs_and_frees(*events: int) -> list[Op]:
    """Positive: MiB to allocate; negative: the number, from 1, of the allocation to free."""
    ops: list[Op] = []
    for event in events:
        storage = sum(op[0] == "malloc" for op in ops)
        ops.append(("malloc", storage, event * MIB, 0) if event > 0 else ("free", -event - 1, 0, 0))
    return ops


@pytest.mark.parametrize(
    ("settings", "events", "smaller", "larger"),
    [
        ("", (24, 10, -2, 14, -3, 24, 4, 16), 70, 72),
        ("expandable_segments:True", (30, 10, 10, -1, 8, 30), 70, 72),
    ],
)
def test_between_the_two_fitting_is_not_monotone_in_the_capacity(
    settings: str, events: tuple[int, ...], smaller: int, larger: int
) -> None:
    """Under the smaller capacity the cache is released early and the segments are laid anew; under the larger one small
    requests settle in cached segments, which then cannot go back. PyTorch's own allocator does the same on both."""
    ops = mallocs_and_frees(*events)
    assert fits(ops, smaller * MIB, settings)
    assert not fits(ops, larger * MIB, settings)
