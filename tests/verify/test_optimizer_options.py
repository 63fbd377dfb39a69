"""Options of optimizers that differ by rank are named, and so are frozen nets that a step moves on one rank alone.

python -m pytest tests/verify/test_optimizer_options.py
"""

import copy
import re

import pytest
import torch
from torch import nn

from memfit.engine.single import Single
from memfit.verify.compare import _other_weights
from memfit.verify.optimizer_options import options_of, other_options
from memfit.verify.recording_engine import RecordingEngine
from memfit.verify.world_worker import _sums_by_net
from tests.verify.jobs import Sound


def options(**changed):
    net = nn.Linear(2, 2)
    groups = [{"params": [net.weight], "lr": 1e-2}, {"params": [net.bias]}]
    return options_of({"adam": torch.optim.AdamW(groups, **{"lr": 1e-3, **changed})})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lr": 2e-3}, "lr = 0.001 on rank 0 and 0.002 on rank 2"),
        ({"betas": (0.9, 0.99)}, r"betas = \(0.9, 0.999\) on rank 0 and \(0.9, 0.99\) on rank 2"),
        ({"lr": torch.tensor(0.5), "foreach": False}, "on rank 2"),
    ],
)
def test_the_first_rank_with_other_options_is_named(changed, said):
    (finding,) = other_options([options(), options(), options(**changed)])
    assert (finding.code, finding.kind) == ("rank_options", "fault")
    assert re.search(said, finding.text)


def test_the_same_options_are_no_finding():
    assert other_options([options(), options()]) == []
    rate = {"lr": torch.tensor(0.5), "foreach": False}
    assert other_options([options(**rate), options(**rate)]) == []


def test_a_frozen_net_that_a_step_moves_on_one_rank_alone_is_named():
    net = nn.Linear(2, 2)
    nets = {"net": net, "average": copy.deepcopy(net).requires_grad_(False)}
    here = _sums_by_net(RecordingEngine(Single()), nets)
    nets["average"].weight.add_(1)
    there = _sums_by_net(RecordingEngine(Single()), nets)
    assert _other_weights(Sound(), [here, here]) == []
    (finding,) = _other_weights(Sound(), [here, there])
    assert (finding.code, finding.kind) == ("unsynchronised", "fault")
    assert "average" in finding.text
