"""The search for the largest size, of a job that refuses some sizes.

python -m pytest tests/planner/test_size_search.py
"""

import pytest

from memfit.planner.size_search import QUESTIONS, REFUSALS, RefusedSizeError, search_size


def needs_of(takes, too_long=lambda size: False):
    """(7 bytes for each of a size and 100 more, of the sizes that a job takes; the sizes that were tried)."""
    tried = []

    def needs(size):
        tried.append(size)
        if too_long(size) or not takes(size):
            raise RefusedSizeError(ValueError(f"no {size}"), f"no {size}", too_long=too_long(size))
        return 100 + 7 * size

    return needs, tried


@pytest.mark.parametrize("limit", [1_000, 12_345, 700_000])
@pytest.mark.parametrize(
    ("takes", "step"),
    [
        (lambda size: size > 1, 1),
        (lambda size: size % 2 == 0, 2),
        (lambda size: size % 4 == 0 or size < 4, 4),
        (lambda size: size % 32 == 0, 32),
    ],
)
def test_the_largest_of_the_sizes_that_a_job_takes(takes, step, limit):
    needs, tried = needs_of(takes)
    answer = search_size(needs, limit, starts=(1, 2, 32), own=None)
    expected = max(size for size in range(step, (limit - 100) // 7 + 1, step) if takes(size))
    assert answer.size == expected
    assert answer.exact
    assert answer.ended is None
    assert expected + step in tried
    if step > 1:
        assert answer.step == step
        assert not takes(answer.stepped.size)
        assert answer.stepped.reason == f"no {answer.stepped.size}"
    assert len(tried) <= QUESTIONS + REFUSALS


@pytest.mark.parametrize("own", [512, 768, 2048])
def test_widths_that_heads_do_not_divide_are_left_out(own):
    needs, _ = needs_of(lambda size: size % 64 == 0)
    answer = search_size(needs, 100 + 7 * 5_000, starts=(1, own), own=own)
    assert (answer.size, answer.exact, answer.step) == (4992, True, 64)


@pytest.mark.parametrize("most", [1024, 777])
def test_the_search_ends_below_what_a_job_refuses(most):
    needs, _ = needs_of(lambda size: size <= most)
    answer = search_size(needs, 1 << 40, starts=(1, most), own=most)
    assert (answer.size, answer.exact, answer.ended.size) == (most, False, most + 1)
    assert not answer.stopped


@pytest.mark.parametrize("own", [None, 256, 384])
@pytest.mark.parametrize("most", [700, 1000, 5000])
def test_a_bound_beside_multiples_of_a_step_is_no_step(most, own):
    needs, tried = needs_of(lambda size: size <= most)
    answer = search_size(needs, 1 << 40, starts=(1,), own=own)
    assert (answer.size, answer.step, answer.ended.size) == (most, 1, most + 1)
    assert len(tried) < 80


@pytest.mark.parametrize("most", [700, 5000])
def test_an_estimate_above_the_bound_of_a_job_does_not_creep(most):
    needs, tried = needs_of(lambda size: size <= most)

    def likely(low, other, high):
        return min((500_000 - 100) // 7, high - 1)

    answer = search_size(needs, 500_000, likely, starts=(1, 256), own=256)
    assert (answer.size, answer.ended.size) == (most, most + 1)
    assert len(tried) < 80


@pytest.mark.parametrize("step", [3, 6, 12, 96])
@pytest.mark.parametrize("own", [None, 384])
def test_steps_that_are_no_powers_of_two(step, own):
    needs, _ = needs_of(lambda size: size % step == 0)
    answer = search_size(needs, 100 + 7 * 5_000, starts=(1, own or 96), own=own)
    assert (answer.size, answer.exact, answer.step) == (5_000 // step * step, True, step)


@pytest.mark.parametrize(("least", "size"), [(400, 1271), (1271, 1271), (1272, None)])
def test_sizes_below_the_least_that_a_job_takes_are_searched_from_above(least, size):
    needs, _ = needs_of(lambda tried: tried >= least)
    answer = search_size(needs, 9_000, starts=(1, 16_000), own=16_000)
    assert (answer.size, answer.exact) == (size, True)
    assert answer.smallest >= least


def test_a_job_that_takes_no_size_is_told_why():
    needs, _ = needs_of(lambda size: False)
    with pytest.raises(ValueError, match="no 12"):
        search_size(needs, 1_000, starts=(1, 12), own=12)
    with pytest.raises(ValueError, match=r"no 1$"):
        search_size(needs, 1_000, starts=(1, 2, 3))


def test_traces_that_are_too_long_end_the_search():
    needs, tried = needs_of(lambda size: True, too_long=lambda size: size > 9_000)
    answer = search_size(needs, 1 << 50, starts=(1,))
    assert answer.stopped
    assert not answer.exact
    assert 4_500 <= answer.size <= 9_000
    assert sum(size > 9_000 for size in tried) <= 3


def test_few_sizes_are_tried_above_the_most_that_a_job_takes():
    needs, tried = needs_of(lambda size: size <= 1999)
    assert search_size(needs, 1 << 40, starts=(1, 64), own=64).size == 1999
    assert len(tried) < 25
