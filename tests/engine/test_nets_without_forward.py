"""Nets and blocks that are dicts of modules, whose parts a loss calls one by one.

python -m pytest tests/engine/test_nets_without_forward.py
"""

import pytest
from torch import nn

from memfit.blocks import repeated_blocks
from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Shape
from memfit.planner.predict import predict
from testing.linear_layer import LinearLayer


class Parts(LinearLayer):
    """Blocks that are dicts."""

    def nets(self):
        blocks = [nn.ModuleDict({"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}) for _ in range(3)]
        return {"net": Called(blocks)}


class Called(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return x


class Uncalled(Parts):
    def nets(self):
        return {"net": nn.ModuleDict(dict(super().nets()["net"].named_children()))}

    def loss(self, nets, batch):
        return Called.forward(nets["net"], batch["x"]).square().sum(), len(batch["x"])


def test_blocks_without_a_forward_are_neither_recomputed_nor_gathered_one_by_one():
    assert repeated_blocks(Parts().nets()) == []
    predict(Parts(), "parts", Shape(items=2), find_device("t4"), engine="fsdp2", world=2)


def test_a_net_without_a_forward_is_refused_by_name():
    predict(Uncalled(), "uncalled", Shape(items=2), find_device("t4"), engine="ddp", world=2)
    with pytest.raises(InputError, match="net 'net' on --engine fsdp2: a ModuleDict has no forward"):
        predict(Uncalled(), "uncalled", Shape(items=2), find_device("t4"), engine="fsdp2", world=2)
