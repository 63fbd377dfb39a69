"""Optimizers rebuilt with another implementation keep their rule and groups; others stay as they are.

python -m pytest tests/apply/test_optimizer_implementation.py
"""

import pytest
import torch
from torch import nn

from memfit.apply.optimizer_implementation import implementation_of, with_implementation


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
def test_an_optimizer_of_pytorch_is_rebuilt_with_its_groups_and_another_one_stays(implementation):
    net = nn.Linear(3, 2)
    adam = torch.optim.AdamW([{"params": [net.weight], "lr": 0.5}, {"params": [net.bias]}], lr=0.1, weight_decay=0.2)
    lbfgs = torch.optim.LBFGS(net.parameters())
    rebuilt = with_implementation({"adam": adam, "lbfgs": lbfgs}, implementation)
    assert implementation_of(rebuilt["adam"], cuda=False) == implementation
    assert [(group["lr"], group["weight_decay"]) for group in rebuilt["adam"].param_groups] == [(0.5, 0.2), (0.1, 0.2)]
    assert rebuilt["adam"].param_groups[1]["params"][0] is net.bias
    assert rebuilt["lbfgs"] is lbfgs
