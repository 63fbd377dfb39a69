"""The caching allocator's rules, one exact example each."""

import importlib.metadata
from dataclasses import replace

import pytest

from memfit.replay.allocator_config import AllocatorConfig, takes_youngest
from memfit.replay.caching_allocator import CachingAllocator, round_size, segment_size
from memfit.replay.errors import OutOfMemory

KIB, MIB = 1 << 10, 1 << 20


def allocator(
    capacity: int | None = None, settings: str = "", youngest_first: bool = False, **more: object
) -> CachingAllocator:
    config = replace(AllocatorConfig.parse(settings), youngest_first=youngest_first)
    return CachingAllocator(capacity, config, history=[], **more)  # type: ignore[arg-type]


def malloc(a: CachingAllocator, *sizes: int, first: int = 0, stream: int = 0) -> None:
    for at, nbytes in enumerate(sizes, start=first):
        a.malloc(at, nbytes, stream)


def address(a: CachingAllocator, storage: int) -> int:
    assert a.history is not None
    return next(event[1] for event in reversed(a.history) if event[0] == "alloc" and event[4] == storage)


def actions(a: CachingAllocator) -> list[tuple[str, int]]:
    assert a.history is not None
    return [(event[0], event[2]) for event in a.history]


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(nbytes: int, size: int) -> None:
    assert round_size(nbytes, AllocatorConfig()) == size
    a = allocator()
    malloc(a, nbytes)
    assert (a.requested, a.peak_requested) == (nbytes, nbytes)


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(1200, 1536), (2048, 2048), (2049, 2560), (3 * KIB, 3 * KIB), (5 * MIB + 1, 6 * MIB), (7 * MIB + 1, 8 * MIB)],
)
def test_roundup_power2_divisions_rounds_to_steps_between_powers_of_two(nbytes: int, size: int) -> None:
    assert round_size(nbytes, AllocatorConfig.parse("roundup_power2_divisions:4")) == size


def test_roundup_power2_divisions_takes_the_division_of_the_size_class() -> None:
    config = AllocatorConfig.parse("roundup_power2_divisions:[64:1,256:2,>:4]")
    assert round_size(65 * MIB + 1, config) == 65 * MIB + 512
    assert round_size(129 * MIB, config) == 129 * MIB, "a class that was not named is off"
    assert round_size(257 * MIB, config) == 384 * MIB
    assert round_size(513 * MIB, config) == 640 * MIB


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (33 * MIB, 34)],
)
def test_segments(size: int, segment: int) -> None:
    assert segment_size(size, AllocatorConfig()) == segment * MIB
    a = allocator()
    malloc(a, size)
    assert (a.reserved, a.peak_reserved) == (segment * MIB, segment * MIB)


def test_large_segment_size_mb_replaces_the_20_mib() -> None:
    a = allocator(settings="large_segment_size_mb:32")
    malloc(a, 2 * MIB, 4 * MIB)
    assert a.reserved == 32 * MIB


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


class TestMaxSplitSize:
    def test_an_oversize_block_is_not_given_to_a_smaller_request(self) -> None:
        a = allocator(settings="max_split_size_mb:30")
        malloc(a, 30 * MIB)
        a.free(0)
        malloc(a, 29 * MIB, first=1)
        assert a.reserved == 60 * MIB

    def test_an_oversize_block_is_taken_whole_within_the_rounding(self) -> None:
        a = allocator(settings="max_split_size_mb:30")
        malloc(a, 50 * MIB)
        a.free(0)
        malloc(a, 30 * MIB + 512, first=1)
        assert (a.reserved, a.allocated, a.requested) == (50 * MIB, 50 * MIB, 30 * MIB + 512)

    def test_an_oversize_block_past_the_rounding_is_not_taken(self) -> None:
        a = allocator(settings="max_split_size_mb:30")
        malloc(a, 50 * MIB)
        a.free(0)
        malloc(a, 30 * MIB, first=1)
        assert a.reserved == 80 * MIB
        b = allocator(settings="max_split_size_mb:30,max_non_split_rounding_mb:21")
        malloc(b, 50 * MIB)
        b.free(0)
        malloc(b, 30 * MIB, first=1)
        assert b.reserved == 50 * MIB

    def test_on_failure_the_smallest_sufficient_oversize_block_is_released_and_nothing_else(self) -> None:
        a = allocator(150 * MIB, "max_split_size_mb:30")
        malloc(a, 30 * MIB, 40 * MIB, 60 * MIB, 12 * MIB)
        for storage in range(4):
            a.free(storage)
        malloc(a, 22 * MIB, first=4)
        assert actions(a)[-3:] == [("segment_free", 30 * MIB), ("segment_alloc", 22 * MIB), ("alloc", 22 * MIB)]
        assert a.retries == 0

    def test_on_failure_the_largest_oversize_blocks_are_released_until_they_add_up(self) -> None:
        a = allocator(110 * MIB, "max_split_size_mb:30")
        malloc(a, 30 * MIB, 34 * MIB, 36 * MIB)
        for storage in range(3):
            a.free(storage)
        malloc(a, 60 * MIB, first=3)
        assert actions(a)[-4:] == [
            ("segment_free", 36 * MIB), ("segment_free", 34 * MIB), ("segment_alloc", 60 * MIB), ("alloc", 60 * MIB),
        ]  # fmt: skip
        assert a.retries == 0


class TestGarbageCollection:
    """Ages are searches of the large pools since a block was freed; a search is counted for every large request."""

    def test_past_the_threshold_the_segments_older_than_the_mean_are_released(self) -> None:
        a = allocator(settings="garbage_collection_threshold:0.5", allowed=100 * MIB)
        malloc(a, 30 * MIB, 20 * MIB)
        a.free(0)
        malloc(a, 40 * MIB, first=2)
        assert a.reserved == 90 * MIB, "at the threshold nothing is collected"
        a.free(1)
        # Ages at the next search: 30 MiB 2, 20 MiB 1, their mean 1.5; the excess over 50 MiB is 40, so two passes.
        malloc(a, 44 * MIB, first=3)
        assert actions(a)[-4:] == [
            ("segment_free", 30 * MIB), ("segment_free", 20 * MIB), ("segment_alloc", 44 * MIB), ("alloc", 44 * MIB),
        ]  # fmt: skip
        assert a.retries == 0

    def test_younger_segments_stay_where_the_older_ones_suffice(self) -> None:
        a = allocator(settings="garbage_collection_threshold:0.6", allowed=100 * MIB)
        malloc(a, 32 * MIB)
        malloc(a, 12 * MIB, first=1, stream=1)
        a.free(0)
        malloc(a, 20 * MIB, first=2, stream=2)
        a.free(1)
        # 64 MiB reserved, 4 over. Ages at the next search: 32 MiB 2, 12 MiB 1.
        malloc(a, 14 * MIB, first=3, stream=2)
        assert [nbytes for action, nbytes in actions(a) if action == "segment_free"] == [32 * MIB]
        assert a.reserved == 46 * MIB

    def test_without_a_memory_fraction_pytorch_collects_nothing(self) -> None:
        a = allocator(100 * MIB, settings="garbage_collection_threshold:0.1")
        malloc(a, 30 * MIB)
        a.free(0)
        malloc(a, 40 * MIB, first=1)
        assert a.reserved == 70 * MIB


class TestExpandableSegments:
    SETTINGS = "expandable_segments:True"

    @pytest.mark.parametrize("capacity", [-400 * MIB, 0, 1 * MIB, 64 * MIB])
    def test_a_request_larger_than_the_device_is_out_of_memory(self, capacity: int) -> None:
        """The context alone may be larger than a small card's memory: then nothing is left for tensors."""
        a = allocator(capacity, self.SETTINGS)
        with pytest.raises(OutOfMemory):
            malloc(a, 100 * MIB)

    def test_pages_of_2_mib_for_small_and_20_mib_for_large_requests(self) -> None:
        a = allocator(settings=self.SETTINGS)
        malloc(a, 512, 2 * MIB)
        assert a.reserved == 22 * MIB
        malloc(a, 30 * MIB, first=2)
        assert a.reserved == 42 * MIB, "the request continues in the free 18 MiB of the first page"

    def test_large_requests_tile_without_the_remainder_of_1_mib(self) -> None:
        a = allocator(settings=self.SETTINGS)
        malloc(a, 19 * MIB, MIB + 1)
        assert (a.allocated, a.reserved) == (20 * MIB + 512, 40 * MIB)
        assert [[block.size for block in run] for run in a.segments()] == [[19 * MIB, MIB + 512, 20 * MIB - 512]]

    def test_the_segment_grows_at_its_end_as_one_run(self) -> None:
        a = allocator(settings=self.SETTINGS)
        malloc(a, 40 * MIB, 70 * MIB)
        a.free(0)
        a.free(1)
        malloc(a, 120 * MIB, first=2)
        assert (a.reserved, len(a.segments())) == (120 * MIB, 1)

    def test_best_fit_counts_a_block_with_the_room_behind_it(self) -> None:
        a = allocator(settings=self.SETTINGS)
        malloc(a, 30 * MIB, 12 * MIB)
        a.free(0)
        # free: 30 MiB at the start, 18 MiB before the unmapped end; the end's block is the smaller, but can grow.
        malloc(a, 15 * MIB, first=2)
        assert address(a, 2) == address(a, 0)

    def test_only_whole_pages_inside_a_free_block_are_unmapped(self) -> None:
        a = allocator(settings=self.SETTINGS)
        malloc(a, 10 * MIB, 50 * MIB, 10 * MIB)
        a.free(1)
        a.empty_cache()
        assert a.reserved == 40 * MIB, "of the pages 0-20, 20-40, 40-60, 60-80 the second and the third are wholly free"
        assert [[block.size for block in run] for run in a.segments()] == [[10 * MIB, 10 * MIB], [10 * MIB, 10 * MIB]]

    def test_a_hole_is_mapped_again_before_the_end_grows(self) -> None:
        a = allocator(settings=self.SETTINGS)
        malloc(a, 20 * MIB, 40 * MIB, 20 * MIB)
        a.free(1)
        a.empty_cache()
        assert a.reserved == 40 * MIB
        malloc(a, 30 * MIB, first=3)
        assert (address(a, 3), a.reserved) == (address(a, 0) + 20 * MIB, 80 * MIB)

    def test_on_failure_the_other_pools_pages_are_unmapped_and_the_request_succeeds(self) -> None:
        a = allocator(60 * MIB, self.SETTINGS)
        malloc(a, 40 * MIB, stream=1)
        a.free(0)
        malloc(a, 60 * MIB, first=1)
        assert (a.retries, a.reserved) == (1, 60 * MIB)

    def test_pages_count_against_the_capacity(self) -> None:
        a = allocator(39 * MIB, self.SETTINGS)
        malloc(a, 12 * MIB)
        with pytest.raises(OutOfMemory):
            malloc(a, 12 * MIB, first=1)
        malloc(a, 8 * MIB, first=1)
        assert a.reserved == 20 * MIB

    def test_a_memory_fraction_counts_the_request_and_not_the_pages(self) -> None:
        a = allocator(settings=self.SETTINGS, allowed=24 * MIB)
        malloc(a, 24 * MIB)
        assert a.reserved == 40 * MIB


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
