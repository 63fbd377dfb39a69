"""Tensors of the host in a traced script: what is written to them, and what autograd makes of them on a CPU."""

from pathlib import Path

import pytest

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import real_peaks, trace_here


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


def test_the_backward_of_a_product_of_real_factors_is_the_one_of_a_real_run(tmp_path: Path) -> None:
    """A real tensor's backward took the formula for factors of zero, because a trace is a dispatch mode. It takes it
    where a factor is zero: the gradient is a number."""
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    zero = torch.tensor([[0., 2., 3.]], requires_grad=True)\n"
        "    zero.prod(1).sum().backward()\n"
        "    assert zero.grad.tolist() == [[6., 0., 0.]]\n"
        "    places = (torch.rand(256, 8, 3) + 0.5).requires_grad_()\n"
        "    loss = net(places.prod(-1)).mean() + places.cumprod(1).mean()\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    del places, loss\n",
        device="cpu",
        memory_bytes=1 << 30,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert live_peaks(outcome.bare) == pytest.approx(real_peaks(tmp_path, outcome.bare), rel=100e-6)
