"""What scales with the micro-batch in a selection problem, and what does not.

python -m pytest tests/planner/test_scaled_problem.py
"""

import numpy as np

from memfit.planner.search.checkpoint_options import CheckpointOption
from memfit.planner.search.selection import Problem, scaled, solve

MIB = 1 << 20


def option(seconds):
    return CheckpointOption(modes={}, kept=np.zeros((1, 1)), peak=np.zeros((1, 2)), seconds=seconds)


def problem():
    """One block: keep takes 40 more MiB than recomputing, which takes 2 seconds; 100 MiB are resident, 60 are not."""
    return Problem(
        ways=[[option(0.0), option(2.0)]],
        base=np.array([160.0]) * MIB,
        bytes=[np.array([[40.0, 0.0]]) * MIB],
        resident=100.0 * MIB,
    )


def test_resident_bytes_stay_and_the_rest_grows_with_the_micro_batch():
    twice = scaled(problem(), 2.0, 3.0)
    assert twice.base.tolist() == [(100 + 2 * 60) * MIB]
    assert twice.bytes[0].tolist() == [[80.0 * MIB, 0.0]]
    assert [way.seconds for way in twice.ways[0]] == [0.0, 6.0]


def test_fixed_bytes_stay_too():
    assert scaled(problem(), 2.0, 1.0, fixed=10.0 * MIB).base.tolist() == [(110 + 2 * 50) * MIB]


def test_the_fastest_choice_within_the_budget_is_taken_and_none_where_nothing_is():
    assert solve(problem(), 200.0 * MIB) == [0]
    assert solve(problem(), 199.0 * MIB) == [1]
    assert solve(problem(), 159.0 * MIB) is None
