"""pytest tests/batch/test_packing.py"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.batch.cost import PaddedCost
from memfit.batch.packing import length_classes, plan_epoch
from memfit.errors import InputError


def plan(lengths, budget, world=1, seed=0, epoch=0, noise=0.0, **options):
    lengths = np.asarray(lengths)
    settings = {"cost": PaddedCost(), "max_items": None, **options}
    return plan_epoch(length_classes(lengths, noise), budget=budget, world=world, seed=(seed, epoch, 0), **settings)


def test_a_step_takes_as_many_as_its_longest_allows_on_every_rank() -> None:
    epoch = plan([10] * 4 + [5] * 12, budget=20, world=2)
    assert sorted(map(tuple, epoch.counts.tolist())) == [(2, 2), (2, 2), (4, 4)]
    batches = [sorted(10 if i < 4 else 5 for i in epoch.ids(s, r)) for s in range(3) for r in range(2)]
    assert sorted(batches) == [[5] * 2] * 2 + [[5] * 4] * 2 + [[10, 10]] * 2


def test_a_last_step_too_small_for_the_ranks_shares_with_the_one_before() -> None:
    epoch = plan([1] * 17, budget=4, world=4)
    assert epoch.counts.shape == (2, 4)
    assert sorted(epoch.counts.ravel().tolist()) == [2, 2, 2, 2, 2, 2, 2, 3]


def test_batches_are_split_where_steps_cannot_be_shared() -> None:
    epoch = plan([4, 1, 1, 1, 1], budget=4, world=4)
    assert sorted(epoch.counts.ravel().tolist()) == [1, 1, 1, 2]


@pytest.mark.parametrize(("remainder", "given_ids", "repeated", "dropped"), [
    ("empty", 9, 0, 0),
    ("repeat", 16, 7, 0),
    ("drop", 8, 0, 1),
])  # fmt: skip
def test_what_cannot_be_split_is_counted_and_named(remainder, given_ids, repeated, dropped) -> None:
    epoch = plan([4] * 9, budget=4, world=8, remainder=remainder)
    ids = [i for s in range(epoch.steps) for r in range(8) for i in epoch.ids(s, r)]
    assert len(ids) == given_ids
    assert (len(epoch.repeated), len(epoch.dropped)) == (repeated, dropped)
    counted = np.bincount(ids, minlength=9)
    expected = np.ones(9, dtype=int)
    np.add.at(expected, epoch.repeated, 1)
    np.add.at(expected, epoch.dropped, -1)
    assert counted.tolist() == expected.tolist()


def test_what_cannot_be_split_is_an_error_by_default() -> None:
    with pytest.raises(InputError, match="7 ranks would have none in the last step"):
        plan([4] * 9, budget=4, world=8)


def test_no_samples_make_no_steps() -> None:
    assert plan(np.empty(0, dtype=np.int64), budget=4, world=3).steps == 0


@given(
    lengths=st.lists(st.integers(1, 70_000), min_size=1, max_size=120),
    extra=st.integers(0, 200_000),
    quadratic=st.sampled_from([0.0, 1e-4]),
    max_items=st.none() | st.integers(1, 9),
    world=st.integers(1, 9),
    seed=st.integers(0, 3),
    noise=st.sampled_from([0.0, 0.01, 0.5]),
    real=st.booleans(),
)
def test_every_id_once_equal_counts_cost_within_budget(lengths, extra, quadratic, max_items, world, seed, noise, real):
    cost = PaddedCost(quadratic=quadratic)
    values = np.array(lengths) / (7.0 if real else 1)
    values = values if real else values.astype(np.int64)
    budget = float(cost.of(1, values.max())) + extra
    options = {"cost": cost, "max_items": max_items, "noise": noise, "seed": seed, "remainder": "empty"}
    epoch = plan(values, budget, world, **options)
    batches = [epoch.ids(s, r) for s in range(epoch.steps) for r in range(world)]
    assert np.sort(np.concatenate(batches)).tolist() == list(range(len(values)))
    for batch in batches:
        assert max_items is None or len(batch) <= max_items
        assert not len(batch) or cost.of(len(batch), values[batch].max()) <= budget
    if any(not len(batch) for batch in batches):
        with pytest.raises(InputError):
            plan(values, budget, world, **{**options, "remainder": "error"})
    again = plan(values, budget, world, **options)
    assert np.array_equal(epoch.starts, again.starts)
    assert np.array_equal(epoch.order, again.order)


def test_the_number_of_steps_is_the_same_in_every_epoch() -> None:
    lengths = np.random.default_rng(0).integers(30, 2000, 5000)
    for noise in (0.0, 0.01, 0.03):
        steps = {plan(lengths, 20_000, world=3, epoch=epoch, noise=noise).steps for epoch in range(5)}
        assert len(steps) == 1


def test_lognormal_speech_meets_the_bounds_of_padding_imbalance_and_threshold() -> None:
    """0.3 to 30 s at 93.75 frames a second, 8 ranks, threshold 38,400: at most 0.5 % of each."""
    rng = np.random.default_rng(1)
    lengths = (np.clip(rng.lognormal(1.6, 0.7, 1_000_000), 0.3, 30) * 93.75).astype(np.int64)
    for noise in (0.0, 0.01):
        epoch = plan(lengths, 38_400, world=8, noise=noise)
        starts = np.sort(epoch.starts.ravel())
        place = np.searchsorted(starts, epoch.starts.ravel())
        longest = np.maximum.reduceat(lengths[epoch.order], starts)[place].reshape(epoch.starts.shape)
        frames = longest * epoch.counts
        assert frames.max() <= 38_400
        assert 1 - lengths.sum() / frames.sum() <= 0.005
        for load in (frames, frames * longest):
            assert (load.max(axis=1) / load.mean(axis=1) - 1).mean() <= 0.005


def test_whole_lengths_share_a_class_within_the_noise_and_are_their_own_without() -> None:
    lengths = np.array([100, 101, 102, 200, 100])
    own = length_classes(lengths)
    assert own.longest[own.of_sample].tolist() == lengths.tolist()
    noisy = length_classes(lengths, noise=0.05)
    assert len(np.unique(noisy.of_sample)) < len(np.unique(lengths))
    assert (noisy.longest[noisy.of_sample] <= lengths * 1.05).all()


def test_lengths_that_are_not_whole_keep_their_fraction() -> None:
    lengths = np.array([1.25, 7.5, 3.0])
    classes = length_classes(lengths)
    assert classes.longest[classes.of_sample].tolist() == lengths.tolist()


def test_whole_lengths_over_a_wide_range_are_classed_finely() -> None:
    lengths = np.array([1, 70_000, 35_000])
    classes = length_classes(lengths)
    assert classes.longest[classes.of_sample].tolist() == lengths.tolist()
