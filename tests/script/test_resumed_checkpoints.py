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
