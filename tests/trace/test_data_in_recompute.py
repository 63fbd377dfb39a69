"""Numbers that a block makes from Python data, where the block is recomputed in a thread of autograd's.

python -m pytest tests/trace/test_data_in_recompute.py
"""

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.planner.predict import predict
from testing.linear_layer import LinearLayer

MAKERS = {
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "empty": lambda x: torch.tensor([], dtype=x.dtype, device=x.device).sum(),
    "as_tensor": lambda x: torch.as_tensor([1.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
}


class Block(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.first, self.last = make, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.first(x).relu() + self.make(x))


class Makes(LinearLayer):
    how: str = "tensor"

    def nets(self):
        return {"net": nn.Sequential(*[Block(MAKERS[self.how]) for _ in range(3)])}


@pytest.mark.parametrize("how", MAKERS)
def test_a_recomputed_block_makes_numbers_from_data(how):
    modes = {f"net.{number}": "full" for number in range(3)}
    job, shape, card = Makes(how=how), Shape(items=1000), find_device("t4")
    kept, recomputed = (predict(job, "makes", shape, card, checkpointing=chosen) for chosen in ({}, modes))
    saved = [each.footprint.phases["train"].categories["activations"] for each in (kept, recomputed)]
    assert saved[1] < saved[0]
