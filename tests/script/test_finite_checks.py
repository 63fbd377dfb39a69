"""Scripts that train only where the loss is finite, and optimizers that look at whether weights are zero."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

LOOP = (
    "import torch\n"
    "net = torch.nn.Linear(64, 8).cuda()\n"
    "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
    "for step in range(3):\n"
    "    loss = net(torch.randn(16, 64).cuda()).pow(2).mean()\n"
    "    if {check}:\n"
    "        loss.backward()\n"
    "        optimizer.step()\n"
)
CHECKS = (
    "~(torch.isnan(loss) | torch.isinf(loss))", "torch.isfinite(loss)", "not torch.isnan(loss)", "~loss.isnan()",
    "(~torch.isnan(net.weight)).all()", "torch.logical_not(torch.isinf(loss))", "net.weight.any()",
    "not (torch.isnan(net.weight).any() or torch.isinf(net.weight).any())",
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_a_loss_is_finite(check: str, tmp_path: Path) -> None:
    assert trace_here(tmp_path, LOOP.format(check=check)).windows == 3
