"""What settings of the caching allocator change (PYTORCH_CUDA_ALLOC_CONF), one exact example each."""

import pytest

from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import round_size
from memfit.replay.errors import OutOfMemory
from tests.replay.allocator_calls import KIB, MIB, actions, address, allocator, malloc


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


def test_large_segment_size_mb_replaces_the_20_mib() -> None:
    a = allocator(settings="large_segment_size_mb:32")
    malloc(a, 2 * MIB, 4 * MIB)
    assert a.reserved == 32 * MIB


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
