"""How samples are packed into windows and dealt to ranks, on numbers small enough to check by hand.

python -m pytest tests/batch/test_windows.py
"""

import numpy as np
import pytest

from memfit.batch.cost import PaddedCost
from memfit.batch.rank_split import balanced, even
from memfit.batch.windows import Windows
from memfit.errors import InputError
from memfit.plan import Plan


def test_a_window_may_be_filled_exactly():
    """Eight samples of 5 units: windows of 20 hold four, not three."""
    windows = Windows(size=8, lengths=[5] * 8, global_batch=20, micro_batch=10)
    assert windows.per_epoch(0) == 2
    assert [len(windows.window(number).ids) for number in range(2)] == [4, 4]
    assert [len(micro) for micro in windows.window(0).micro_batches] == [2, 2]


def test_a_micro_batch_may_be_filled_exactly_and_no_further():
    windows = Windows(size=3, lengths=[4, 4, 4], global_batch=12, micro_batch=8)
    assert [len(micro) for micro in windows.window(0).micro_batches] == [2, 1]


def test_the_costliest_micro_batches_are_dealt_first():
    """Costs 5, 3, 3, 2, 2, 1 on two ranks: 8 and 8 where the costliest come first; cheapest first gives 7 and 9."""
    lengths = np.array([5, 3, 3, 2, 2, 1])
    dealt = balanced([(i,) for i in range(6)], lengths, PaddedCost(), 2)
    assert sorted(sum(int(lengths[i]) for micro in share for i in micro) for share in dealt) == [8, 8]


def test_the_first_ranks_get_one_sample_more_and_every_sample_once():
    assert even(range(11), 5, 2) == (((0, 1, 2, 3, 4), (5,)), ((6, 7, 8, 9, 10),))
    assert even(range(2), 5, 3) == (((0,),), ((1,),), ())


def test_the_windows_of_a_plan_have_its_batches_and_seed():
    plan = Plan(
        job="", settings={}, device="cpu", budget_bytes=1, unit="samples", global_batch=6, micro_batch=2,
        micro_batches=[[2, 1], [2, 1]], arithmetic="", engine="single", precision="fp32", seed=7,
    )  # fmt: skip
    windows = Windows.of_plan(plan, size=20, lengths=None, ranks=2)
    same = Windows(size=20, lengths=None, global_batch=6, micro_batch=2, seed=7, ranks=2)
    assert [windows.window(number) for number in range(8)] == [same.window(number) for number in range(8)]
    assert tuple(tuple(map(len, share)) for share in windows.window(0).ranks) == ((2, 1), (2, 1))


def test_a_data_set_of_one_sample_is_a_window():
    windows = Windows(size=1, lengths=None, global_batch=4, micro_batch=2)
    assert windows.window(0).ids == (0,)
    with pytest.raises(InputError, match="0 samples"):
        Windows(size=0, lengths=None, global_batch=4, micro_batch=2)
