"""Trainings that a script repeats, such as folds of a cross-validation: what the earlier ones leave is seen."""

from pathlib import Path

import pytest

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_here

FOLDS = """
import torch
from torch import nn
loader = torch.utils.data.DataLoader(torch.ones(64, 64), 8)
def validate(net):
    with torch.no_grad():
        for batch in loader:
            net(batch.cuda())
def train(fold):
    net = nn.Linear(64, 4096).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for epoch in range(20):
        for batch in loader:
            net(batch.cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()
        validate(net)
        torch.save(net.state_dict(), f"{fold}.pt")
    return net
"""
WEIGHTS = 65 * 4096 * 4


@pytest.mark.parametrize(
    "loop",
    [
        "for fold in range(5):\n    nets.append(train(fold))\n",
        "fold = 0\nwhile fold < 5:\n    nets.append(train(fold)); fold += 1\n",
    ],
)
def test_nets_of_earlier_folds_are_beside_the_last_one(tmp_path: Path, loop: str) -> None:
    outcome = trace_here(tmp_path, f"{FOLDS}nets = []\n{loop}")
    alone = trace_here(tmp_path, f"{FOLDS}train(0)\n")
    assert outcome.bare is not None
    assert alone.bare is not None
    more, least = live_peaks(outcome.bare), live_peaks(alone.bare)
    for phase in ("train", "validate", "save"):
        assert more[phase] - least[phase] == pytest.approx(4 * WEIGHTS, rel=0.02), phase
    assert not any("each of which leaves" in line for line in outcome.not_seen)


def test_folds_that_leave_nothing_are_three_at_most(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, f"{FOLDS}for fold in range(5):\n    train(fold)\n")
    assert len(outcome.steps) == 3
    assert not any("each of which leaves" in line for line in outcome.not_seen)


def test_what_many_trainings_leave_is_told_where_not_all_ran(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, f"{FOLDS}nets = []\nwhile True:\n    nets.append(train(1))\n")
    assert outcome.footprint is not None
    place = f"{tmp_path / 'train.py'}:11"
    (line,) = (line for line in outcome.not_seen if "each of which leaves" in line)
    assert line == f"more trainings with the optimizer of {place}, each of which leaves 1.0 MiB in memory"
    assert any(line.startswith(f"{place}: memory grows with each training") for line in outcome.footprint.assumed)
