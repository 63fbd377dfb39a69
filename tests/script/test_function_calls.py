"""Nets that are functions of their weights, as in a first course: no module is called."""

from pathlib import Path

import pytest

from memfit.script.outcome import NO_VALIDATION, ScriptOutcome
from tests.script.script_trace import trace_here

SCRIPT = """
import torch, torch.nn.functional as F
device = 'cuda' if torch.cuda.is_available() else 'cpu'
C, W1, W2 = (torch.randn(*size, device=device) for size in ((32, 64), (192, 256), (256, 32)))
for weight in (C, W1, W2):
    weight.requires_grad = True
X, Y = torch.randint(0, 32, (20_000, 3), device=device), torch.randint(0, 32, (20_000,), device=device)
optimizer = torch.optim.SGD([C, W1, W2], lr=0.1)
average = W1.detach().clone()
for step in range(4):
    chosen = torch.randint(0, len(X), (1000,))
    hidden = torch.tanh(C[X[chosen]].view(-1, 192) @ W1)
    loss = F.cross_entropy(hidden @ W2, Y[chosen])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    with torch.no_grad():
        average.lerp_(W1, 0.1); W1.norm(); W1.t() @ W1
"""
VALIDATION = """
with torch.no_grad():
    hidden = torch.tanh(C[X].view(-1, 192) @ W1)
    F.cross_entropy(hidden @ W2, Y)
"""


def trace(tmp_path: Path, text: str, device: str) -> ScriptOutcome:
    outcome = trace_here(tmp_path, text, device=device)
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 4
    return outcome


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_forward_of_a_function_is_validation_and_has_a_line(tmp_path: Path, device: str) -> None:
    outcome = trace(tmp_path, f"{SCRIPT}{VALIDATION}torch.save(W1, 'W1.pt')\n", device)
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}
    validated = 20_000 * (192 + 256) * 4
    assert outcome.peak_bytes["validate"] > validated > outcome.peak_bytes["train"] - 20 * 1024**2 * (device != "cpu")
    halved = [option.where for option in outcome.options if option.name == "half the micro-batch"]
    assert [where.rpartition(":")[2] for where in halved] == ["12"]


def test_averages_and_norms_of_weights_are_no_validation(tmp_path: Path) -> None:
    outcome = trace(tmp_path, SCRIPT, "rtx4090")
    assert outcome.peak_bytes.keys() == {"train"}
    assert NO_VALIDATION in outcome.not_seen


MERGE = """
frozen = torch.nn.Parameter(torch.randn(192, 256, device=device), requires_grad=False)
with torch.no_grad():
    merged = {"product": (2 * C.t()) @ C, "through": frozen.t() @ (W1 * 2)}
torch.save(merged, 'merged.pt')
"""


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_weights_that_are_merged_before_they_are_saved_are_no_validation(tmp_path: Path, device: str) -> None:
    outcome = trace(tmp_path, f"{SCRIPT}torch.save(W1, 'W1.pt'){MERGE}", device)
    assert outcome.peak_bytes.keys() == {"train", "save"}


def test_what_is_loaded_after_the_last_save_is_no_training(tmp_path: Path) -> None:
    text = f"{SCRIPT}torch.save(W1, 'W1.pt')\nlarge = torch.ones(64, 1024, 1024, device=device)\n"
    outcome = trace(tmp_path, text, "rtx4090")
    assert outcome.peak_bytes["save"] > 256 * 1024**2 > outcome.peak_bytes["train"]


ENSEMBLE = """
import copy, torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
device = 'cuda' if torch.cuda.is_available() else 'cpu'
nets = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device) for _ in range(6)]
weights, buffers = stack_module_state(nets)
base = copy.deepcopy(nets[0]).to('meta')
optimizer = torch.optim.Adam(weights.values())
def forward(x):
    return vmap(lambda own, state: functional_call(base, (own, state), (x,)))(weights, buffers)
for step in range(4):
    optimizer.zero_grad(); forward(torch.randn(32, 64, device=device)).sum().backward(); optimizer.step()
with torch.no_grad():
    forward(torch.randn(4096, 64, device=device)).mean(0)
torch.save(weights, 'ensemble.pt')
"""


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_forward_through_stacked_weights_is_validation(tmp_path: Path, device: str) -> None:
    outcome = trace(tmp_path, ENSEMBLE, device)
    hidden = 6 * 4096 * 256 * 4
    assert outcome.peak_bytes["validate"] > hidden > outcome.peak_bytes["save"]
    assert outcome.peak_bytes["train"] < hidden
