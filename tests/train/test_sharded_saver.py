"""When a checkpoint in parts is written: as soon as every optimizer that keeps state has stepped.

python -m pytest tests/train/test_sharded_saver.py
"""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import memfit
from memfit.apply.train_state import build
from memfit.engine.single import Single
from memfit.train.checkpoint import sharded_saver
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.optimizer_state import keeps_state
from memfit.train.checkpoint.parts_index import INDEX
from memfit.train.checkpoint.parts_storage import _name
from memfit.train.checkpoint.sharded_checkpoint import load_sharded, save_sharded
from memfit.train.checkpoint.sharded_saver import ShardedSaver
from tests.train.test_checkpoints import PLAN

OPTIMIZERS = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1), False),
    "momentum": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), True),
    "adamw": (lambda ps: torch.optim.AdamW(ps, lr=0.1), True),
    "fused": (lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True), True),
    "muon": (lambda ps: torch.optim.Muon(ps, lr=0.1), True),
}


class TwoNets(memfit.Job):
    first: str = "sgd"
    second: str = "adamw"

    def nets(self):
        return {"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)}

    def optimizers(self, nets):
        kinds = {"a": self.first, "b": self.second}
        return {name: OPTIMIZERS[kind][0](list(nets[name].parameters())) for name, kind in kinds.items()}


def stepped(train_state, *names):
    for name in names:
        for parameter in train_state.nets[name].parameters():
            parameter.grad = torch.ones_like(parameter)
        train_state.optimizers[name].step()
        train_state.optimizers[name].zero_grad()
    return train_state


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_an_optimizer_without_state_is_known_before_and_after_its_step(kind):
    make, keeps = OPTIMIZERS[kind]
    net = nn.Linear(4, 4, bias=False)
    optimizer = make(list(net.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the object's step
    before = net.weight.detach().clone()
    assert keeps_state(optimizer) is keeps
    assert torch.equal(net.weight, before)
    assert not optimizer.state
    assert schedule.last_epoch == 0


class NeedsTwo(torch.optim.SGD):
    """A step of one parameter fails."""

    def step(self, closure=None):
        self.param_groups[0]["params"][1].grad.zero_()


def test_an_optimizer_that_cannot_be_tried_is_taken_to_keep_state():
    assert keeps_state(NeedsTwo(list(nn.Linear(2, 2).parameters()), lr=0.1))


@pytest.mark.parametrize(
    ("first", "second", "steps", "writes"),
    [
        ("sgd", "sgd", ("a", "b"), True),
        ("sgd", "adamw", ("a", "b"), True),
        ("momentum", "adamw", ("a",), False),
        ("momentum", "adamw", ("a", "b"), True),
        ("sgd", "adamw", ("a",), False),
    ],
)
def test_a_checkpoint_is_written_once_every_optimizer_with_state_has_stepped(tmp_path, first, second, steps, writes):
    train_state = stepped(build(TwoNets(first=first, second=second), torch.device("cpu"), Single()), *steps)
    weights = {name: net.weight.detach().clone() for name, net in train_state.nets.items()}
    saver = ShardedSaver(checkpoints=Checkpoints(tmp_path), plan=PLAN)
    saver.save(train_state, 1)
    assert (saver.written == 1) is writes
    assert (tmp_path / "00000001" / "parts" / INDEX).exists() is writes
    assert all(torch.equal(net.weight, weights[name]) for name, net in train_state.nets.items())
    if writes:
        again = build(TwoNets(first=first, second=second), torch.device("cpu"), Single())
        load_sharded(again, tmp_path / "00000001" / "parts")
        assert all(torch.equal(net.weight, weights[name]) for name, net in again.nets.items())
        assert again.optimizers["b"].state_dict()["param_groups"][0]["lr"] == 0.1


def test_a_chunk_is_named_by_where_it_begins_in_its_tensor():
    assert _name(MetadataIndex("net.weight", (16, 0))) == "net.weight@16,0"
    assert _name(MetadataIndex("net.weight", (0, 0))) == "net.weight"
    assert _name(MetadataIndex("net.weight")) == "net.weight"


@pytest.mark.parametrize("failures", [1, 2])
def test_parts_are_written_in_a_second_try_where_memory_ran_out_in_the_first(tmp_path, failures, monkeypatch):
    train_state = stepped(build(TwoNets(), torch.device("cpu"), Single()), "a", "b")
    said, left = [], [failures]

    def save(*arguments):
        left[0] -= 1
        if left[0] >= 0:
            torch.empty(1 << 60, dtype=torch.uint8)
        save_sharded(*arguments)

    monkeypatch.setattr(sharded_saver, "save_sharded", save)
    saver = ShardedSaver(checkpoints=Checkpoints(tmp_path), plan=PLAN, say=said.append)
    saver.save(train_state, 1)
    assert saver.finish() is (saver.written == 1) is (failures == 1)
    assert len(said) == failures - 1
    assert all("no memory for it" in line and line.endswith("with a larger --memory") for line in said)
