"""pytest tests/batch/test_cost.py"""

import numpy as np
import pytest

from memfit.batch.cost import PaddedCost, fit_cost
from memfit.errors import InputError
from memfit.job import Shape


def test_cost_of_padded_units_and_their_squares() -> None:
    assert PaddedCost().of(4, 100) == 400
    assert PaddedCost(linear=2, quadratic=0.5).of(4, 10) == 4 * (20 + 50)


def test_most_items_never_costs_more_than_the_budget() -> None:
    cost = PaddedCost(linear=0.1)
    lengths = np.arange(1, 500)
    most = cost.most_items(lengths, 77.7)
    assert np.all(cost.of(most, lengths) <= 77.7)
    assert np.all(cost.of(most + 1, lengths) > 77.7 - 1e-9)
    assert PaddedCost().most_items(3000, 2999) == 0


def test_a_cost_is_found_again_from_what_shapes_cost() -> None:
    shapes = [Shape(items=b, length=n) for b, n in ((1, 10), (4, 10), (2, 100), (1, 300))]
    cost, fixed = fit_cost(shapes, [1000 + 8 * s.items * s.length + 0.25 * s.items * s.length**2 for s in shapes])
    assert (cost.linear, cost.quadratic, fixed) == pytest.approx((8, 0.25, 1000))


def test_shapes_that_cannot_tell_the_parts_apart_are_refused() -> None:
    with pytest.raises(InputError, match="at least three shapes"):
        fit_cost([Shape(items=b, length=10) for b in (1, 2, 3)], [1, 2, 3])
    with pytest.raises(InputError, match="cost something"):
        PaddedCost(linear=0)
