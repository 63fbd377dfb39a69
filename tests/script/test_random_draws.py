"""Shuffled data comes in the order of the real run: what fake tensors of the host would draw is drawn.

python -m pytest tests/script/test_random_draws.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.script import random_draws
from tests.script.script_trace import trace_here

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Embedding(10, 6), nn.GRU(6, 5), nn.Identity())
noisy = nn.Sequential(nn.Linear(7, 33), nn.Dropout(0.3), nn.Linear(33, 1, dtype=torch.float64))
nn.init.trunc_normal_(noisy[0].weight, std=0.02); nn.init.trunc_normal_(noisy[0].bias, std=0.02, a=-0.02, b=0.02)
nn.init.trunc_normal_(net[0].weight, std=2.0, a=-0.5, b=0.9); nn.init.orthogonal_(noisy[2].weight)
nn.init.xavier_normal_(net[0].weight)
net.to(device), noisy.to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = torch.utils.data.DataLoader(range(40), 5, shuffle=True)
for epoch in range(2):
    for batch in loader:
        print("batch", *batch.tolist())
        out = noisy[1](noisy[0](torch.randn(3, 7).to(device))).bernoulli(0.5)
        kept = torch.rand_like(out) < torch.nn.functional.dropout(out, 0.2)
        loss = net[1](net[0](batch.to(device) % 10)[None])[0].square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def batches(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("batch")]


def really(folder: Path, text: str) -> list[str]:
    script = folder / "real.py"
    script.write_text(text)
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    return batches(ran.stdout)


def test_initialization_and_dropout_on_the_cpu_draw_what_a_real_run_draws(tmp_path: Path, capfd) -> None:
    outcome = trace_here(tmp_path, SCRIPT, device="cpu", memory_bytes=1 << 30, batches=100)
    assert outcome.error is None, outcome.error.text
    assert len(seen := batches(capfd.readouterr().out)) == 16
    assert seen == really(tmp_path, SCRIPT)


def test_a_net_that_is_initialized_on_the_host_of_a_card_draws_too(tmp_path: Path, capfd) -> None:
    """On the card itself nothing is drawn from the host's stream; a CPU takes the place of the card in the real run."""
    text = SCRIPT.replace("out = noisy", "continue; out = noisy")
    outcome = trace_here(tmp_path, text, batches=100)
    assert outcome.windows == 0
    seen = batches(capfd.readouterr().out)
    assert len(seen) == 16
    assert seen == really(tmp_path, text)


def test_draws_stop_where_they_would_take_long(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_draws, "MOST_DRAWN_AT_ONCE", 100)
    outcome = trace_here(tmp_path, SCRIPT, device="cpu", memory_bytes=1 << 30, batches=100)
    assert outcome.error is None, outcome.error.text
    assert batches(capfd.readouterr().out) != really(tmp_path, SCRIPT)
