"""The allocator without a cache."""

import pytest

from memfit.replay.cpu_allocator import CpuAllocator
from memfit.replay.errors import OutOfMemory


def test_what_is_asked_for_is_what_is_held() -> None:
    a = CpuAllocator(1000)
    a.malloc(0, 600)
    a.malloc(1, 400, stream=1)
    assert (a.allocated, a.reserved, a.requested) == (1000, 1000, 1000)
    a.free(0)
    a.empty_cache()
    assert (a.allocated, a.reserved, a.peak_allocated, a.peak_reserved, a.retries) == (400, 400, 1000, 1000, 0)
    a.reset_peaks()
    assert (a.peak_allocated, a.peak_requested) == (400, 400)


def test_a_request_past_the_capacity_fails_and_changes_nothing() -> None:
    a = CpuAllocator(1000)
    a.malloc(0, 600)
    with pytest.raises(OutOfMemory, match="401 B asked for, 600 B of 1000 B reserved") as caught:
        a.malloc(1, 401)
    assert (caught.value.nbytes, caught.value.limit, a.allocated) == (401, 1000, 600)
