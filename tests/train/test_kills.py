"""kill -9 at random moments of a run, saving included: resumed, it ends as if it had never been killed.

python -m pytest tests/train/test_kills.py [-m slow]; a hundred times: python bench/kills.py
"""

import random

import pytest

from tests.train.killing import kill_and_resume, make_plan, server


@pytest.mark.parametrize(
    ("writing", "kills"),
    [
        ("asynchronous", 6),
        pytest.param("synchronous", 20, marks=pytest.mark.slow),
        pytest.param("asynchronous", 20, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_bit_for_bit_like_the_undisturbed_one(tmp_path, writing, kills):
    plan = make_plan(tmp_path, writing)
    with server() as one:
        count = kill_and_resume(one, tmp_path, plan, kills, random.Random(kills))
    assert count.kills == kills
    assert count.finished >= 1
    assert count.passed_over == 0
