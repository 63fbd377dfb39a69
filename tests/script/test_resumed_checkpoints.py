"""Scripts that load a checkpoint that they saved themselves: its tensors count where they are."""

from pathlib import Path

import pytest

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
