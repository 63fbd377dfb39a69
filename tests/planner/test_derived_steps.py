"""pytest tests/planner/test_derived_steps.py: where a step follows from two traced ones, and where it does not."""

from dataclasses import replace

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_steps import TRACES, card_groups, derived_ranges, traced_lengths
from memfit.planner.job_facts import facts_of
from memfit.planner.predict import trace_question
from memfit.planner.step_range import EXACT
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


def test_a_size_between_whole_numbers_of_bytes_is_not_derived(step):
    trace_at, _ = sized(step, lambda items: items // 2)
    halves = next(item for item in derived_ranges(trace_at, 4) if item.low == 2)
    assert halves.bytes_at(3) is None or halves.bytes_at(3)[1] == 1


def test_sizes_that_a_job_refuses_or_doubles_cannot_hold_are_left_out(step):
    trace_at, _ = sized(step, lambda items: EXACT // 2 * (items > 100))
    assert max(item.high for item in derived_ranges(trace_at, MOST)) <= 100
    ranges = derived_ranges(lambda items: step if items > 1 else "ValueError: one item", MOST)
    assert [(item.low, item.high) for item in ranges] == [(2, MOST)]


def test_lengths_are_the_longest_its_half_and_its_quarter():
    class Long(LinearLayer):
        longest = 1000

    assert traced_lengths(facts_of(Long())) == (224, 480, 1000)
    assert traced_lengths(facts_of(LinearLayer())) == (None,)


def test_cards_that_run_the_same_kernels_share_traces_and_a_processor_has_none():
    asked = AskedJob("linear", LinearLayer)
    group, other = card_groups(asked, [find_device("rtx4090"), find_device("t4"), find_device("h100")])
    assert {"rtx4090", "l4", "t4"} <= {card.key for card in group.cards}
    assert "h100" in {card.key for card in other.cards}
    with pytest.raises(InputError, match="cards alone"):
        card_groups(asked, [find_device("cpu")])
