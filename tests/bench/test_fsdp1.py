"""FSDP1 in the loops of recipes: what a rank holds of a net that is sharded and accumulates."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from bench.accuracy_parts import loop
from bench.accuracy_parts.loop import Loop, trace_loop
from bench.accuracy_parts.nets_by_name import Built
from memfit.device.hardware.catalogue import find_device
from memfit.planner.prediction import footprint_on

ROOT = Path(__file__).resolve().parents[2]
REAL_GROUP = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from tests.bench.test_fsdp1 import WIDTH, Block

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = FullyShardedDataParallel(Block(), use_orig_params=True, device_id=torch.device("cpu"))
with net.no_sync():
    net(torch.ones(1, WIDTH)).sum().backward()
(handle,) = [module._handle for module in net.modules() if isinstance(module, FullyShardedDataParallel)]
print(handle.flat_param.grad.numel())
dist.destroy_process_group()
"""
"""Prints the elements of the gradient that one micro-batch without a step leaves."""
WIDTH, BLOCKS = 512, 4
NBYTES = 2 * BLOCKS * 8 * WIDTH * WIDTH
"""Bytes of the blocks' weights in bf16."""


class Block(nn.Module):
    """A frozen layer beside a trained one that is small, as LoRA's."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.trained = nn.Linear(WIDTH, 1, bias=False)
        self.wide.requires_grad_(False)
        self.narrow.requires_grad_(False)

    def forward(self, x):
        return self.narrow(self.wide(x)) * self.trained(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(8, WIDTH), "h": nn.ModuleList([Block() for _ in range(BLOCKS)])}
        )
        self.lm_head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, ids, lm_head_chunk_size):
        x = self.transformer.wte(ids)
        for block in self.transformer.h:
            x = block(x)
        return [self.lm_head(part) for part in x.split(lm_head_chunk_size, dim=1)]


def peak(monkeypatch, **asked):
    monkeypatch.setattr(loop, "build_net", lambda asked: Built(net=Net()))
    given = {"net": "x", "kind": "litgpt-lora", "length": 8, "precision": "bf16", "zero_grad": "after_step",
             "optimizer": "SGD", "cublas_workspace": False, "fsdp1": True, "iterations": 4}  # fmt: skip
    card = find_device("rtx3060")
    return footprint_on(trace_loop(Loop(**given | asked), card), card).phases["train"].allocated_bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_of_weights_and_gradients_and_a_few_whole_units(monkeypatch, ranks):
    """Whole are a unit's weights, its gradient, and weights that are gathered ahead."""
    unit = NBYTES / BLOCKS
    whole = peak(monkeypatch, ranks=ranks) - 2 * NBYTES / ranks
    assert 2.5 * unit < whole < 4 * unit


def test_an_iteration_without_a_step_leaves_whole_gradients_of_frozen_weights_too(monkeypatch):
    """``use_orig_params``: a unit has one flat parameter, whose gradient is whole where any of its parts is trained."""
    more = peak(monkeypatch, ranks=4, accumulates=True) - peak(monkeypatch, ranks=4)
    assert more > 0.7 * NBYTES


def test_fsdp1_on_a_real_group_has_a_gradient_of_the_whole_flat_parameter():
    """The same on torch itself, with gloo on the CPU, in a process of its own: a process has one default group."""
    done = subprocess.run([sys.executable, "-c", REAL_GROUP], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 8 * WIDTH * WIDTH + WIDTH
