"""torch.optim.LBFGS is traced with its whole history.

python -m pytest tests/script/test_lbfgs_history.py
"""

from pathlib import Path

import pytest

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_alone, trace_here


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_the_history_of_lbfgs_is_full_and_is_state_of_the_optimizer(tmp_path: Path, device: str) -> None:
    vectors, numbers = 2 * 7, 256 * 256
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "image = torch.rand(256, 256, device=where, requires_grad=True)\n"
        "optimizer = torch.optim.LBFGS([image], max_iter=20, history_size=7, line_search_fn='strong_wolfe')\n"
        "def closure():\n"
        "    optimizer.zero_grad(); loss = image.square().sum(); loss.backward(); return loss\n"
        "for step in range(3):\n"
        "    optimizer.step(closure)\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    state = outcome.footprint.phases["train"].categories["optimizer"]
    assert vectors * numbers * 4 <= state < (vectors + 5) * numbers * 4
    assert any("torch.optim.LBFGS" in line and "7 directions" in line for line in outcome.not_seen), outcome.not_seen


SHORT = """
import torch
image = torch.rand(64, 64, requires_grad=True)
optimizer = torch.optim.LBFGS([image], max_iter=4, history_size=100)
def closure():
    optimizer.zero_grad(); loss = image.square().sum(); loss.backward(); return loss
"""
LOOP = "for step in range(3):\n    optimizer.step(closure)\n"
LOADER = "for batch in torch.utils.data.DataLoader(range(1000)):\n    optimizer.step(closure)\n"


def test_a_short_run_is_traced_with_the_history_that_its_steps_make_at_most(tmp_path: Path) -> None:
    outcome = trace_alone(tmp_path, SHORT + LOOP, device="cpu", memory_bytes=8 << 30)
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    state = outcome.footprint.phases["train"].categories["optimizer"]
    assert 2 * 12 * 64 * 64 * 4 <= state < (2 * 12 + 6) * 64 * 64 * 4
    assert any("as long as its steps can make it, with 12 directions" in line for line in outcome.not_seen)


@pytest.mark.parametrize(("loop", "iterations"), [(LOOP, 12), (LOADER, None)])
def test_a_run_whose_steps_were_not_all_seen_has_the_whole_history(tmp_path: Path, loop: str, iterations) -> None:
    outcome = trace_here(tmp_path, SHORT + loop, device="cpu", memory_bytes=8 << 30)
    assert outcome.error is None, outcome.error.text
    assert outcome.lbfgs_iterations == iterations
    assert any("full, with 100 directions" in line for line in outcome.not_seen)


COMPLEX = """
import torch
image = torch.nn.Parameter(torch.rand(256, 128, dtype=torch.cfloat))
optimizer = torch.optim.LBFGS([image], lr=0.001, max_iter=4, history_size=3)
def closure():
    optimizer.zero_grad()
    loss = torch.view_as_real(image).expand(64, 256, 128, 2).square().sum()
    loss.backward()
    return loss
for step in range(3):
    optimizer.step(closure)
"""
VECTOR = 2 * 256 * 128 * 4


def test_complex_weights_are_two_numbers_each_and_a_step_replaces_the_oldest_of_the_history(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, COMPLEX, device="cpu", memory_bytes=8 << 30)
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    alive = live_peaks(outcome.bare)["train"] - 3 * 64 * VECTOR
    assert alive == pytest.approx(12 * VECTOR, rel=0.01), "as in a real run: 6 of the history, and what a step has"
