"""Operations of a call: torch's formulas, and what is counted where they do not take the call.

python -m pytest tests/trace/test_operators.py
"""

import torch
from torch.utils.flop_counter import flop_registry

from memfit.trace.operators import work


def test_an_overload_with_more_arguments_than_the_formula_takes_is_counted():
    total, left, right = torch.zeros(3, 5), torch.zeros(3, 7), torch.zeros(7, 5)
    formula = flop_registry[torch.ops.aten.addmm]
    assert work(formula, (total, left, right, torch.float32), {"out": total}, total) == 2 * 3 * 7 * 5


def test_a_formula_that_raises_does_not_end_the_trace():
    def of_a_library(*args, out_val=None, **kwargs):
        raise KeyError("a layout that it does not know")

    assert work(of_a_library, (torch.zeros(3),), {}, None) == 0
