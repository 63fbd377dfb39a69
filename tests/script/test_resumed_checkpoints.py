"""Scripts that load a checkpoint that they saved themselves, or a file of data: its tensors count where they are."""

from pathlib import Path

import pytest
import torch

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_here

SCRIPT = (
    "import copy, torch\n"
    "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    "net = torch.nn.Linear(512, 512).to(device)\n"
    "optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)\n"
    "torch.save(net.state_dict(), 'net.pt')\n"
    "kept = {kept}\n"
    "net.load_state_dict(kept)\n"
    "for step in range(3):\n"
    "    net(torch.randn(8, 512, device=device)).sum().backward()\n"
    "    optimizer.step()\n"
)


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_checkpoint_that_is_kept_takes_its_bytes(device: str, tmp_path: Path) -> None:
    peaks = {}
    for kept in ("torch.load('net.pt')", "copy.deepcopy(net.state_dict())"):
        outcome = trace_here(tmp_path, SCRIPT.format(kept=kept), device=device)
        assert outcome.error is None, outcome.error.text
        assert outcome.bare is not None
        peaks[kept] = live_peaks(outcome.bare)["train"]
    loaded, copied = peaks.values()
    assert loaded == copied


SAVED_NETS = """
import copy, torch
device = 'cuda' if torch.cuda.is_available() else 'cpu'
net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.LSTM(512, 8)).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    net(torch.randn(8, 512, device=device))[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({'net': COPY}, 'net.pt')
"""


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_copy_of_a_net_is_gone_once_it_is_saved(device: str, tmp_path: Path) -> None:
    peaks = {}
    for copied in ("net.state_dict()", "copy.deepcopy(net)"):
        outcome = trace_here(tmp_path, SAVED_NETS.replace("COPY", copied), device=device)
        assert outcome.error is None, outcome.error.text
        assert outcome.bare is not None
        assert not outcome.growth
        peaks[copied] = live_peaks(outcome.bare)
    states, nets = peaks.values()
    assert nets["train"] == states["train"]
    assert nets["save"] > states["save"]


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_net_that_was_saved_as_a_whole_is_another_net_when_it_is_read(device: str, tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.LSTM(512, 8)).to(device)\n"
        "torch.save({'net': net, 'first': net[0], 'weights': net[0].state_dict(), 'lock': compile}, 'net.pt')\n"
        "read = torch.load('net.pt', weights_only=False)\n"
        "assert read['net'] is not net and read['net'][0] is read['first']\n"
        "weight = read['first'].weight\n"
        "assert isinstance(weight, torch.nn.Parameter) and weight is not net[0].weight and weight.requires_grad\n"
        "assert weight.device == net[0].weight.device\n"
        "on_host = torch.load('net.pt', map_location='cpu', weights_only=False)['net'][0].weight\n"
        "assert on_host.device.type == 'cpu'\n"
        "del on_host\n"
        "optimizer = torch.optim.SGD(read['net'].parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    read['net'](torch.randn(8, 512, device=device))[0].sum().backward(); optimizer.step()\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.peak_bytes["train"] > 3 * 4 * 512 * 512


FROM_FILE = """
import torch
data = READ
weights = data['net']
net = torch.nn.Linear(64, 64)
net.load_state_dict(weights)
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    net(data['x'][step * 64:(step + 1) * 64]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MAPPED = "torch.load('data.pt', mmap=True)"
COPIED = f"(lambda x, net: {{'x': x.clone(), 'net': {{k: v.clone() for k, v in net.items()}}}})(**{MAPPED})"


BYTES_READ = (4096 + 64 + 1) * 256


@pytest.mark.parametrize(
    ("read", "bytes_read"), [(COPIED, BYTES_READ), ("torch.load('data.pt')", BYTES_READ), (MAPPED, 0)]
)
def test_a_file_of_data_takes_its_bytes_on_the_cpu(read: str, bytes_read: int, tmp_path: Path) -> None:
    net = torch.nn.Linear(64, 64).state_dict()
    torch.save({"x": torch.randn(4096, 64), "net": net}, tmp_path / "data.pt")
    outcome = trace_here(tmp_path, FROM_FILE.replace("READ", read), device="cpu")
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert live_peaks(outcome.bare)["setup"] == bytes_read + (64 + 1) * 256
