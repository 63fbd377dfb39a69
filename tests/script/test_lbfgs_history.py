"""torch.optim.LBFGS is traced with its whole history.

python -m pytest tests/script/test_lbfgs_history.py
"""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here


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
