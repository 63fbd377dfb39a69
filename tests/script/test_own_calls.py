"""Nets whose class has a ``__call__`` of its own, which torch's hooks do not see."""

from pathlib import Path

import pytest

from memfit.script.outcome import NO_VALIDATION
from tests.script.script_trace import trace_here

NETS = """
import torch
class Module(torch.nn.Module):
    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)
class Process(Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        return torch.exp(-torch.cdist(x, x) / self.scale)
class Passing(Process):
    def __call__(self, *args):
        return torch.nn.Module.__call__(self, *args)
"""
LOOP = """
optimizer = torch.optim.Adam(net.parameters())
points = torch.randn(256, 8).cuda()
for step in range(3):
    optimizer.zero_grad(); net(points).sum().backward(); optimizer.step()
net.eval()
with torch.no_grad():
    net(torch.randn(1024, 8).cuda())
"""


@pytest.mark.parametrize(("kind", "line"), [("Process", "20"), ("Passing", "14")])
def test_a_forward_of_a_net_with_a_call_of_its_own_is_validation_and_has_a_line(
    tmp_path: Path, kind: str, line: str
) -> None:
    outcome = trace_here(tmp_path, f"{NETS}net = {kind}().cuda()\n{LOOP}")
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
    assert NO_VALIDATION not in outcome.not_seen
    assert outcome.peak_bytes["validate"] > 1024**2 * 4 > outcome.peak_bytes["train"] / 2
    halved = [option.where for option in outcome.options if option.name == "half the micro-batch"]
    assert [where.rpartition(":")[2] for where in halved] == [line]
