"""The caching allocator's rules, one exact example each."""

import importlib.metadata

import pytest

from memfit.replay.allocator_config import AllocatorConfig, takes_youngest
from memfit.replay.caching_allocator import CachingAllocator, round_size, segment_size
from memfit.replay.errors import OutOfMemory
from tests.replay.allocator_calls import KIB, MIB, actions, address, allocator, malloc


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(nbytes: int, size: int) -> None:
    assert round_size(nbytes, AllocatorConfig()) == size
    a = allocator()
    malloc(a, nbytes)
    assert (a.requested, a.peak_requested) == (nbytes, nbytes)


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (33 * MIB, 34)],
)
def test_segments(size: int, segment: int) -> None:
    assert segment_size(size, AllocatorConfig()) == segment * MIB
    a = allocator()
    malloc(a, size)
    assert (a.reserved, a.peak_reserved) == (segment * MIB, segment * MIB)


def test_the_smallest_sufficient_free_block_is_taken() -> None:
    a = allocator()
    malloc(a, 30 * MIB, 14 * MIB, 12 * MIB)
    for storage in range(3):
        a.free(storage)
    malloc(a, 13 * MIB, first=3)
    assert address(a, 3) == address(a, 1)


@pytest.mark.parametrize(("torch_version", "taken"), [("2.6.0", 2), ("2.11.0", 2), ("2.12.0", 0), ("2.13.0+cpu", 0)])
def test_among_equal_segments_torch_2_11_takes_the_youngest_and_later_ones_the_oldest(
    torch_version: str, taken: int
) -> None:
    a = allocator(youngest_first=takes_youngest(torch_version))
    malloc(a, 12 * MIB, 12 * MIB, 12 * MIB)
    lies_at = [address(a, storage) for storage in range(3)]
    for storage in (2, 0, 1):
        a.free(storage)
    malloc(a, 12 * MIB, first=3)
    assert address(a, 3) == lies_at[taken]


def test_the_rule_is_that_of_the_installed_torch_unless_another_is_named() -> None:
    assert AllocatorConfig().youngest_first == takes_youngest(importlib.metadata.version("torch"))


def test_small_blocks_split_down_to_512_bytes() -> None:
    a = allocator()
    malloc(a, 2 * KIB, 512)
    assert address(a, 1) == address(a, 0) + 2 * KIB
    assert (a.allocated, a.reserved) == (2 * KIB + 512, 2 * MIB)


def test_a_large_remainder_of_1_mib_is_not_split_off_and_counts_as_allocated() -> None:
    a = allocator()
    malloc(a, 11 * MIB, 13 * MIB - 512)
    assert [len(blocks) for blocks in a.segments()] == [1, 2], "1 MiB stays with its block, 1 MiB + 512 is split off"
    assert (a.allocated, a.requested) == (25 * MIB - 512, 24 * MIB - 512)
    b = allocator()
    malloc(b, 20 * MIB)
    b.free(0)
    malloc(b, 19 * MIB - 512, first=1)
    assert [[block.size for block in blocks] for blocks in b.segments()] == [[19 * MIB - 512, MIB + 512]]


def test_a_request_between_1_and_10_mib_shares_a_20_mib_segment() -> None:
    a = allocator()
    malloc(a, 6 * MIB, 6 * MIB, 6 * MIB)
    assert (a.allocated, a.reserved) == (18 * MIB, 20 * MIB)
    malloc(a, 3 * MIB, first=3)
    assert a.reserved == 40 * MIB


def test_freed_neighbours_merge() -> None:
    a = allocator()
    malloc(a, 4 * MIB, 4 * MIB, 4 * MIB)
    a.free(0)
    a.free(2)
    assert [block.size for block in a.segments()[0]] == [4 * MIB, 4 * MIB, 12 * MIB]
    a.free(1)
    assert [block.size for block in a.segments()[0]] == [20 * MIB]


def test_each_stream_and_each_size_class_has_its_own_pool() -> None:
    a = allocator()
    malloc(a, 12 * MIB)
    a.free(0)
    malloc(a, 12 * MIB, first=1, stream=1)
    assert a.reserved == 24 * MIB
    malloc(a, 512, first=2)
    assert a.reserved == 26 * MIB
    malloc(a, 512, first=3, stream=1)
    assert a.reserved == 28 * MIB


def test_nothing_asked_for_takes_nothing() -> None:
    a = allocator()
    malloc(a, 0)
    assert (a.allocated, a.reserved) == (0, 0)
    a.free(0)


def test_empty_cache_releases_whole_segments_only() -> None:
    a = allocator()
    malloc(a, 4 * MIB, 4 * MIB, 14 * MIB)
    a.free(0)
    a.free(2)
    a.empty_cache()
    assert (a.allocated, a.reserved, a.peak_reserved) == (4 * MIB, 20 * MIB, 34 * MIB)
    a.free(1)
    a.empty_cache()
    assert (a.allocated, a.reserved, a.requested) == (0, 0, 0)


def test_on_failure_free_segments_of_both_pools_and_all_streams_go_back_and_the_request_is_tried_again() -> None:
    a = allocator(16 * MIB)
    malloc(a, 512)
    malloc(a, 12 * MIB, first=1, stream=1)
    a.free(0)
    a.free(1)
    malloc(a, 16 * MIB, first=2)
    assert (a.retries, a.allocated, a.reserved) == (1, 16 * MIB, 16 * MIB)
    assert actions(a)[-4:] == [
        ("segment_free", 12 * MIB), ("segment_free", 2 * MIB), ("segment_alloc", 16 * MIB), ("alloc", 16 * MIB),
    ]  # fmt: skip


def test_a_segment_partly_in_use_is_not_released_and_the_request_fails() -> None:
    a = allocator(32 * MIB)
    malloc(a, 2 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        malloc(a, 18 * MIB + 1, first=1)
    error = caught.value
    assert (error.nbytes, error.segment, error.limit) == (18 * MIB + 1, 20 * MIB, 32 * MIB)
    assert (error.allocated, error.reserved, a.retries) == (2 * MIB, 20 * MIB, 1)
    malloc(a, 18 * MIB, first=1)
    assert a.reserved == 20 * MIB, "after a failure the allocator goes on"


def test_a_memory_fraction_limits_what_is_reserved() -> None:
    a = allocator(64 * MIB, allowed=24 * MIB)
    malloc(a, 12 * MIB, 12 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        malloc(a, 512, first=2)
    assert caught.value.limit == 24 * MIB


def test_a_request_fails_although_a_block_of_another_stream_has_just_returned_and_succeeds_at_once_again() -> None:
    """pytorch/pytorch issue 189504: after waiting for the event, the request asks the device and not its pool."""
    mib = 1 << 20
    allocator = CachingAllocator(20 * mib)
    allocator.malloc(0, 8 * mib)
    allocator.malloc(1, 8 * mib)
    allocator.free(0, awaits_event=True)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(2, 8 * mib)
    assert caught.value.retry_succeeds
    allocator.malloc(2, 8 * mib)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(3, 8 * mib)
    assert not caught.value.retry_succeeds


def test_a_whole_segment_that_awaited_an_event_is_released_and_the_request_succeeds() -> None:
    mib = 1 << 20
    allocator = CachingAllocator(20 * mib)
    allocator.malloc(0, 12 * mib)
    allocator.free(0, awaits_event=True)
    allocator.malloc(1, 16 * mib)
    assert (allocator.allocated, allocator.reserved) == (16 * mib, 16 * mib)


def test_a_block_that_awaits_an_event_is_not_handed_out_before_it_is_over() -> None:
    mib = 1 << 20
    allocator = CachingAllocator()
    allocator.malloc(0, 12 * mib)
    allocator.free(0, awaits_event=True)
    allocator.malloc(1, 12 * mib)
    assert allocator.reserved == 24 * mib
    allocator.process_events()
    allocator.malloc(2, 12 * mib)
    assert allocator.reserved == 24 * mib
