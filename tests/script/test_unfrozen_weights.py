"""Weights that begin to train after some steps: validation and saving are waited for again, beside their state."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

SCRIPT = """
import torch
from torch import nn
encoder, head = nn.Linear(64, 4096), nn.Linear(4096, 8)
optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], foreach=False)
loader = torch.utils.data.DataLoader(torch.ones(16, 64), 8)
step = 0
for epoch in range(20):
    for batch in loader:
        encoder.requires_grad_(step >= {frozen})
        head(encoder(batch)).sum().backward(); optimizer.step(); optimizer.zero_grad(); step += 1
    with torch.no_grad():
        head(encoder(batch))
    torch.save([encoder.state_dict(), optimizer.state_dict()], "last.pt")
"""


def test_saving_has_the_state_of_weights_that_were_frozen_at_first(tmp_path: Path) -> None:
    expected = trace_here(tmp_path, SCRIPT.format(frozen=0), device="cpu").peak_bytes
    peaks = trace_here(tmp_path, SCRIPT.format(frozen=2), device="cpu").peak_bytes
    for phase in ("validate", "save"):
        assert peaks[phase] == pytest.approx(expected[phase], rel=0.01), phase
