"""pytest tests/test_frame_room.py: calls in a loop map no memory, at whatever depth the loop is."""

import resource
import sys
from collections.abc import Callable

import pytest

from memfit.frame_room import in_frame_room

CALLS, DEPTHS = 2000, 400


def _leaf() -> None:
    pass


def _loop() -> None:
    for _ in range(CALLS):
        _leaf()


def _at(depth: int) -> int:
    """Page faults of a loop of calls that begins so many frames deep."""
    if depth:
        return _at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _loop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _most(at: Callable[[int], int]) -> int:
    return max(at(depth) for depth in range(DEPTHS))


def test_no_depth_of_a_loop_makes_its_calls_take_memory_from_the_system():
    assert in_frame_room(_most)(_at) < CALLS // 10


@pytest.mark.parametrize("depth", [0, 100, 300])
def test_nor_in_a_room_within_another(depth: int):
    def nested(left: int) -> int:
        return nested(left - 1) if left else in_frame_room(_most)(_at)

    assert in_frame_room(nested)(depth) < CALLS // 10


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 takes a frame's memory from its own")
def test_without_room_there_is_such_a_depth():
    """What the room is for: once Python no longer does this, it can go."""
    assert _most(_at) >= CALLS


def test_what_a_function_is_and_gives_stays():
    @in_frame_room
    def summed(first: int, *, second: int = 1) -> int:
        """A sum."""
        return first + second

    assert (summed(1, second=2), summed.__name__, summed.__doc__) == (3, "summed", "A sum.")


def test_errors_pass():
    def refused() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_frame_room(refused)()
