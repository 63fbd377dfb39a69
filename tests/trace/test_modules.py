"""Which module an operator belongs to, in backwards that recompute.

python -m pytest tests/trace/test_modules.py
"""

import re
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import Job
from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.trace.session import open_session
from memfit.trace.step import Tracing


class Block(nn.Module):
    """Its own forward makes nodes, before, between and after those of the modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.second(F.gelu(self.first(F.gelu(x)))))


class Deep(Job):
    def nets(self):
        return {"net": nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(6)))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), 0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 8)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("device", ["t4", "cpu"])
def test_equal_blocks_run_the_same_operators_backward(device, mode):
    blocks = [f"net.{number}" for number in range(1, 7)]
    with open_session(Deep(), Tracing(device=find_device(device)), Shape(items=4)) as session:
        trace = session.micro_batch(Shape(items=4), dict.fromkeys(blocks, mode), accumulated=False).trace
    ran = {block: Counter() for block in blocks}
    for name, module, part in zip(trace.operator_name, trace.operator_module, trace.operator_part, strict=True):
        block = re.match(r"net\.\d+", trace.modules[module])
        if trace.parts[part] == "backward" and block and block[0] in ran:
            ran[block[0]][trace.names[name]] += 1
    assert ran["net.1"]["aten.gelu_backward.default"] == 3
    assert ran["net.1"]["aten.gelu.default"] >= 2
    for block in blocks:
        assert ran[block] == ran["net.1"]
