"""Numbers that a block makes from Python data, where the block is recomputed in a thread of autograd's.

python -m pytest tests/trace/test_data_in_recompute.py
"""

import pytest
import torch
from torch import nn

import memfit
from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.planner.predict import predict

MAKERS = {
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "empty": lambda x: torch.tensor([], dtype=x.dtype, device=x.device).sum(),
    "as_tensor": lambda x: torch.as_tensor([1.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
}


class Block(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.first, self.last = make, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.first(x).relu() + self.make(x))


class Makes(memfit.Job):
    how: str = "tensor"

    def nets(self):
        return {"net": nn.Sequential(*[Block(MAKERS[self.how]) for _ in range(3)])}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 64)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)


@pytest.mark.parametrize("how", MAKERS)
def test_a_recomputed_block_makes_numbers_from_data(how):
    modes = {f"net.{number}": "full" for number in range(3)}
    job, shape, card = Makes(how=how), Shape(items=1000), find_device("t4")
    kept, recomputed = (predict(job, "makes", shape, card, checkpointing=chosen) for chosen in ({}, modes))
    saved = [each.footprint.phases["train"].categories["activations"] for each in (kept, recomputed)]
    assert saved[1] < saved[0]
