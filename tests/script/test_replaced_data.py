"""Parameters and buffers whose ``data`` a script sets to another tensor: what the first batch gave, or an average."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

SCRIPT = """
import numpy as np, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
device = 'cuda' if torch.cuda.is_available() else 'cpu'

class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.bias, self.ready = nn.Parameter(torch.ones(256)), nn.Parameter(torch.zeros(256)), False
        self.table = nn.Embedding(100, 256)
        self.table.weight.data = torch.from_numpy(np.ones((100, 256), np.float32))

    def forward(self, x):
        if not self.ready:
            self.scale.data = (x.detach().var(0) + 1e-6).rsqrt()
            self.bias.data = -x.detach().mean(0) * self.scale.data
            self.ready = True
        return x * self.scale + self.bias + self.table.weight[0]

net = Normalised().to(device)
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    data = torch.randn(64, 256).to(device)
    CALL.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert net.scale.data.shape == (256,) and net.scale.is_leaf and net.scale.requires_grad
assert net.table.weight.device.type == device
"""
STATE = 3 * (100 + 2) * 256 * 4
"""Bytes of the weights, and of both moments of Adam."""


@pytest.mark.parametrize("call", ["net(data)", "checkpoint(net, data.requires_grad_(), use_reentrant=True)"])
@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_parameter_may_be_given_other_data(tmp_path: Path, device: str, call: str) -> None:
    outcome = trace_here(tmp_path, SCRIPT.replace("CALL", call), device=device)
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
    kept = sum(variable.bytes for variable in outcome.kept)
    assert STATE < outcome.peak_bytes["train"] < 2.5 * STATE
    assert kept < 2 * STATE


BUFFERS = """
import torch
from torch import nn

class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.register_buffer('codes', torch.randn(128, 64))
        self.register_buffer('counts', torch.zeros(128))
        self.register_buffer('scale', torch.ones(64))
        self.codes.note = 'kept'

    def forward(self, x):
        z = self.project(x)
        ids = torch.cdist(z, self.codes).argmin(-1)
        with torch.no_grad():
            hot = nn.functional.one_hot(ids, 128).type(z.dtype)
            self.counts.data = self.counts * 0.9 + hot.sum(0) * 0.1
            self.codes.data = 0.9 * self.codes + hot.t() @ z / (self.counts.unsqueeze(1) + 1)
        out = z * self.scale + self.codes[ids]
        self.scale.data = z.detach().std(0)  # while the graph holds it
        return out

net = Codebook()
codes = net.codes
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    net(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert net.codes is codes and codes.shape == (128, 64) and codes.note == 'kept'
    assert not codes.requires_grad and codes.device.type == 'cpu'
torch.save(net.state_dict(), 'net.pt')
"""


def test_a_buffer_may_be_given_what_was_computed_of_parameters(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, BUFFERS, device="cpu")
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
    weights, buffers = (64 + 1) * 64 * 4, (128 * 64 + 128 + 64) * 4
    assert outcome.peak_bytes["save"] == 3 * weights + buffers + 2 * 4  # the steps of Adam
