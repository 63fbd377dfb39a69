"""Scripts that are traced for a card and run operators on the host: the card gives no memory for them."""

from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.script import batch_scan
from memfit.script.asked_script import AskedScript
from memfit.script.batch_scan import SIZES, scan_batches
from memfit.script.outcome import NOTHING_ON_CARD, ScriptCommand, TraceRequest
from memfit.script.request_device import requested_device
from memfit.show.script_table import script_headline
from tests.script.script_trace import trace_here

TRAINS = """
import torch
from torch import nn

net = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 32, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(4, 8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FEATURES_ON_THE_HOST = """
import torch
from torch import nn

features = nn.Linear(64, 64).requires_grad_(False)
scale = nn.Parameter(torch.ones(64, device="cuda"))
optimizer = torch.optim.SGD([scale], lr=0.1)
for _ in range(3):
    (features(torch.randn(4, 64)).cuda() * scale).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_product_on_the_host_takes_no_workspace_on_the_card(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, FEATURES_ON_THE_HOST)
    assert outcome.error is None, outcome.error.text
    assert 0 < outcome.peak_bytes["train"] < 1 << 20  # a workspace of cuBLAS has 8 MiB
    assert NOTHING_ON_CARD not in outcome.not_seen


def test_a_script_that_trains_on_the_cpu_is_said_to_leave_the_card_alone(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, TRAINS)
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is None
    assert NOTHING_ON_CARD in outcome.not_seen


def test_a_card_is_not_predicted_for_a_script_that_trains_on_the_cpu(tmp_path: Path, monkeypatch) -> None:
    outcome = trace_here(tmp_path, TRAINS)
    asked = AskedScript(["python", str(tmp_path / "train.py")])
    request = TraceRequest(command=ScriptCommand(target="train.py", args=("{batch}",)), device="rtx4090")
    assert str(script_headline(request, outcome)).startswith("No verdict: it trains on the CPU")
    with pytest.raises(InputError, match="puts no tensor on the card"):
        asked._checked(outcome, requested_device(request))
    monkeypatch.setattr(batch_scan, "trace_scripts", lambda requests: [outcome] * len(requests))
    largest = scan_batches(request, SIZES).largest
    assert largest.batch is None
    assert "puts no tensor on the card" in largest.reason
