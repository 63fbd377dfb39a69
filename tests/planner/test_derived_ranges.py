"""pytest tests/planner/test_derived_ranges.py: where a step follows from two traced ones, and where it does not."""

from dataclasses import replace

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.planner.derived_ranges import TRACES, changes_of, derived_ranges
from memfit.planner.predict import trace_question
from memfit.planner.step_range import EXACT, trace_between
from testing.linear_layer import LinearLayer

MOST = 5000


@pytest.fixture(scope="module")
def step():
    question = trace_question(LinearLayer(), Shape(items=2), find_device("rtx4090"))
    return question.traces[0]


def sized(step, function):
    """A step whose second storage has so many bytes at a number of items."""
    traced = []

    def trace_at(items):
        traced.append(items)
        nbytes = step.nbytes.copy()
        nbytes[1] = function(items)
        return replace(step, nbytes=nbytes)

    return trace_at, traced


def test_bytes_on_a_line_need_four_traces(step):
    trace_at, traced = sized(step, lambda items: 40 + 8 * items)
    single, several = derived_ranges(trace_at, MOST)
    assert (single.low, single.high, several.low, several.high) == (1, 1, 2, MOST)
    assert sorted(set(traced)) == [1, 2, 103, MOST]
    for items in (2, 3, 1234, MOST):
        assert several.bytes_at(items)[1] == 40 + 8 * items


def test_bytes_off_the_line_are_told_from_it(step):
    trace_at, traced = sized(step, lambda items: 8 * items + 512 * (items >= 777))
    ranges = derived_ranges(trace_at, MOST)
    assert len(set(traced)) <= TRACES
    for item in ranges:
        for items in range(item.low, item.high + 1):
            assert item.bytes_at(items)[1] == 8 * items + 512 * (items >= 777)
    assert not any(item.low < 777 <= item.high and item.low < item.high for item in ranges)


def changing(step, sizes):
    """A step that makes one event less from each of these items on, and the sizes that were asked for."""
    traced = []

    def trace_at(items):
        traced.append(items)
        fewer = sum(items >= size for size in sizes)
        kept = slice(0, len(step.kind) - fewer)
        return replace(step, kind=step.kind[kept], storage=step.storage[kept], nbytes=step.nbytes * items)

    return trace_at, traced


@pytest.mark.parametrize("size", [3, 4, 17, 64, 1000, 1999, 2000])
def test_the_size_from_which_another_step_is_made_is_found(step, size):
    trace_at, traced = changing(step, [size])
    ranges = derived_ranges(trace_at, 2000)
    assert [(item.low, item.high) for item in ranges] == [(1, 1), (2, size - 1), (size, 2000)]
    assert changes_of(ranges) == (size,)
    assert len(set(traced)) <= TRACES


def test_several_changes_are_found_and_spare_traces_of_a_like_step(step):
    trace_at, traced = changing(step, [5, 80])
    ranges = derived_ranges(trace_at, 100)
    assert changes_of(ranges) == (5, 80)
    spent = len(set(traced))
    trace_at, traced = changing(step, [5, 80])
    again = derived_ranges(trace_at, 100, changes_of(ranges))
    assert [(item.low, item.high) for item in again] == [(item.low, item.high) for item in ranges]
    assert len(set(traced)) <= 10 < spent


def test_changes_of_another_step_part_no_range(step):
    trace_at, _ = changing(step, [])
    assert [(item.low, item.high) for item in derived_ranges(trace_at, MOST, (5, 80))] == [(1, 1), (2, MOST)]
    trace_at, _ = changing(step, [64])
    assert changes_of(derived_ranges(trace_at, MOST, (5, 80))) == (64,)


def test_the_last_size_that_a_job_takes_is_found(step):
    trace_at, _ = changing(step, [])
    ranges = derived_ranges(lambda items: trace_at(items) if items < 512 else "IndexError: beyond", MOST)
    assert [(item.low, item.high) for item in ranges] == [(1, 1), (2, 511)]


def test_even_sizes_say_nothing_of_odd_ones(step):
    trace_at, traced = changing(step, [])
    ranges = derived_ranges(lambda items: "ValueError: odd" if items % 2 else trace_at(items), MOST)
    assert all(item.low == item.high for item in ranges)
    assert len(set(traced)) <= TRACES


def test_a_size_between_whole_numbers_of_bytes_is_not_derived(step):
    trace_at, _ = sized(step, lambda items: items // 2)
    halves = next(item for item in derived_ranges(trace_at, 4) if item.low == 2)
    assert halves.bytes_at(3) is None or halves.bytes_at(3)[1] == 1


def test_sizes_that_a_job_refuses_or_doubles_cannot_hold_are_left_out(step):
    trace_at, _ = sized(step, lambda items: EXACT // 2 * (items > 100))
    assert max(item.high for item in derived_ranges(trace_at, MOST)) <= 100
    ranges = derived_ranges(lambda items: step if items > 1 else "ValueError: one item", MOST)
    assert [(item.low, item.high) for item in ranges] == [(2, MOST)]


def test_the_step_of_an_even_size_follows_although_the_nearest_traced_ones_are_odd(step):
    trace_at, _ = sized(step, lambda items: 8 * items)
    assert trace_between({items: trace_at(items) for items in (5, 7, 225)}, 64) is None
    trace = trace_between({items: trace_at(items) for items in (1, 4, 5, 7, 225)}, 64)
    assert trace is not None
    assert trace.nbytes[1] == 8 * 64
