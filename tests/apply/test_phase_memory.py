"""What a plan's policy frees for a phase is free in it, and back afterwards.

python -m pytest tests/apply/test_phase_memory.py
"""

import pytest
import torch
from torch import nn

import memfit
from memfit.apply.phase_memory import phase_memory
from memfit.apply.train_state import build
from memfit.plan import PhasePolicy


class Linear(memfit.Job):
    def nets(self):
        torch.manual_seed(0)
        return {"net": nn.Linear(8, 8)}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}


@pytest.fixture
def stepped():
    train_state = build(Linear(), torch.device("cpu"))
    for _ in range(2):
        train_state.nets["net"](torch.ones(2, 8)).sum().backward()
        train_state.optimizers["net"].step()
    return train_state


def state_of(train_state):
    return [own["exp_avg"] for own in train_state.optimizers["net"].state.values()]


@pytest.mark.parametrize("optimizer", ["aside", "keep"])
def test_the_optimizers_state_waits_in_a_file_only_where_the_policy_says_so(stepped, tmp_path, optimizer):
    before = [tensor.clone() for tensor in state_of(stepped)]
    places = [tensor.data_ptr() for tensor in state_of(stepped)]
    with phase_memory(stepped, PhasePolicy(optimizer=optimizer), tmp_path):
        moved = [tensor.data_ptr() != place for tensor, place in zip(state_of(stepped), places, strict=True)]
        assert all(moved) == any(moved) == (optimizer == "aside")
    assert all(torch.equal(tensor, value) for tensor, value in zip(state_of(stepped), before, strict=True))


@pytest.mark.parametrize("gradients", ["free", "keep"])
def test_gradients_are_dropped_unless_the_policy_keeps_them(stepped, gradients):
    with phase_memory(stepped, PhasePolicy(gradients=gradients)):
        assert (stepped.nets["net"].weight.grad is None) == (gradients == "free")
