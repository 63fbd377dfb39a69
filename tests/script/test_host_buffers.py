"""Tensors of the host that a script writes the card's to."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_what_the_card_has_is_written_to_the_host(tmp_path: Path, device: str) -> None:
    """The host's tensor kept the zeros that it was made with: its norm was 0, by which scripts divide."""
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(8, 1).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "lengths, outputs = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 64, 1)\n"
        "for step in range(3):\n"
        "    lengths[step].copy_(torch.arange(4).to(where) + 7)\n"
        "    assert lengths[step].tolist() == [7, 8, 9, 10]\n"
        "    loss = net(torch.ones(64, 8, device=where))\n"
        "    outputs[step] = loss.detach()\n"
        "    assert outputs[step].norm().item() > 0\n"
        "    loss.sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "large = torch.zeros(600_000)\n"
        "large.copy_(net.weight.detach().view(-1)[:1].expand(600_000))\n"
        "assert large.sum() == 0, 'what is large is left alone'\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text
