"""python -m pytest tests/test_geometry.py"""

import pytest

from memfit.batch.windows import Windows
from memfit.errors import InputError
from memfit.geometry import MOST_MICRO_BATCHES, Geometry, parse_shape, shape_of, split
from memfit.job import Job


class Frames(Job):
    longest: int | None = 100


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ((64, 5, 1), ((5,) * 12 + (4,),)),
        ((10, 5, 2), ((5,), (5,))),
        ((7, 2, 3), ((2, 1), (2,), (2,))),
        ((8, 16, 2), ((4,), (4,))),
        ((9, 4, 2), ((4, 1), (4,))),
        ((11, 5, 2), ((5, 1), (5,))),
    ],
)
def test_every_unit_is_in_one_micro_batch_and_the_run_takes_what_the_plan_says(asked, sizes):
    global_batch, micro_batch, ranks = asked
    geometry = split(global_batch, micro_batch, "samples", ranks)
    assert sum(map(sum, geometry.micro_batches)) == global_batch
    assert max(map(max, geometry.micro_batches)) == geometry.micro_batch <= micro_batch
    assert geometry.micro_batches == sizes
    windows = Windows(size=global_batch, lengths=None, global_batch=global_batch, micro_batch=micro_batch, ranks=ranks)
    assert tuple(tuple(map(len, share)) for share in windows.window(0).ranks) == sizes


def test_fewer_units_than_ranks_and_sums_that_do_not_agree_are_refused():
    with pytest.raises(InputError):
        split(2, 1, "samples", 3)
    with pytest.raises(InputError):
        Geometry(unit="samples", global_batch=5, micro_batch=2, micro_batches=((2, 2),))


def test_frames_are_the_fewest_equal_items_of_at_most_the_longest():
    shape = shape_of(Frames(), 250)
    assert (shape.items, shape.length) == (3, 84)
    assert (shape_of(Frames(), 100).items, shape_of(Frames(), 101).items) == (1, 2)


def test_as_many_units_as_ranks_are_one_each():
    assert split(3, 4, "samples", 3).micro_batches == ((1,), (1,), (1,))


@pytest.mark.parametrize(("text", "shape"), [("8x40", (8, 40)), ("1x1", (1, 1)), ("2X100", (2, 100))])
def test_a_shape_is_items_by_length(text, shape):
    parsed = parse_shape(text, Frames())
    assert (parsed.items, parsed.length) == shape


@pytest.mark.parametrize("text", ["8", "0x5", "5x0", "1x2x3", "x", "8x", "-1x4", "65536x65536"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(InputError):
        parse_shape(text, Frames())


def test_items_without_length_are_a_count():
    assert parse_shape("8", Job()).items == 8
    with pytest.raises(InputError):
        parse_shape("8x40", Job())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((64, 5, 1), "64 = 12 x 5 + 4 on 1 device"),
        ((4, 4, 1, 2), "4 = 1 x 4 on 1 group of 2 devices"),
        ((8, 4, 2, 4), "8 = 2 groups of 4 devices x (1 x 4)"),
        ((7, 2, 3, 2), "7 = 3 + 2 x 2 on 3 groups of 2 devices, at most 2 at once"),
        ((10, 5, 1), "10 = 2 x 5 on 1 device"),
        ((10, 5, 2), "10 = 2 devices x (1 x 5)"),
        ((11, 3, 2), "11 = 6 + 5 on 2 devices, at most 3 at once"),
    ],
)
def test_the_arithmetic_is_the_sum_that_is_run(arguments, words):
    global_batch, micro_batch, *ranks = arguments
    assert split(global_batch, micro_batch, "samples", *ranks).arithmetic() == words


@pytest.mark.parametrize(("ranks", "least"), [(1, 2048), (3, 2049), (16384, 2048)])
def test_a_window_of_too_many_micro_batches_is_refused_before_they_are_listed(ranks, least):
    with pytest.raises(
        InputError, match=rf"^--micro-batch 1: .* at most 1048576 micro-batches; write {least} or more$"
    ):
        split(2**31 - 1, 1, "samples", ranks)
    with pytest.raises(InputError, match=f"write {least} or more$"):
        split(2**31 - 1, least - 1, "samples", ranks)
    geometry = split(2**31 - 1, least, "samples", ranks)
    assert 0.9 * MOST_MICRO_BATCHES < sum(map(len, geometry.micro_batches)) <= MOST_MICRO_BATCHES


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ((20001, 1, 9999), "20001 = 3 x 3 + 9996 x 2 on 9999 devices, at most 1 at once"),
        ((5, 2, 3), "5 = 2 x 2 + 1 on 3 devices, at most 2 at once"),
        ((9, 4, 2), "9 = 5 + 4 on 2 devices, at most 4 at once"),
    ],
)
def test_the_sum_counts_equal_shares(asked, text):
    global_batch, micro_batch, ranks = asked
    assert split(global_batch, micro_batch, "samples", ranks).arithmetic() == text
