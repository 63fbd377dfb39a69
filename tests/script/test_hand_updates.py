"""Scripts that update their weights themselves, or by a library's own optimizer."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

SAMPLE = Path(__file__).parent / "samples" / "hand_written_updates.py"
BARE = (
    "import torch\n"
    "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    "x, y = torch.randn(100, 64, device=device), torch.randn(100, 8, device=device)\n"
    "first = torch.randn(64, 32, device=device, requires_grad=True)\n"
    "second = torch.randn(32, 8, device=device, requires_grad=True)\n"
    "for step in range(5):\n"
    "    loss = (x.mm(first).clamp(min=0).mm(second) - y).pow(2).sum()\n"
    "    loss.backward()\n"
    "    with torch.no_grad():\n"
    "        for weight in (first, second):\n"
    "            weight -= 1e-6 * weight.grad\n"
    "            weight.grad = None\n"
)
OWN_OPTIMIZER = (
    "import torch\n"
    "net = torch.nn.Linear(64, 8).cuda()\n"
    "means = {weight: torch.zeros_like(weight) for weight in net.parameters()}\n"
    "for epoch in range(2):\n"
    "    net.train()\n"
    "    for step in range(3):\n"
    "        net(torch.randn(16, 64).cuda()).sum().backward()\n"
    "        for weight, mean in means.items():\n"
    "            mean.mul_(0.9).add_(weight.grad.data, alpha=0.1)\n"
    "            weight.data.addcdiv_(mean, mean.abs() + 1, value=-0.1)\n"
    "            weight.grad.zero_()\n"
    "    net.eval()\n"
    "    with torch.no_grad():\n"
    "        net(torch.randn(256, 64).cuda())\n"
)
LAZY = (
    "import torch\n"
    "net = torch.nn.Sequential(torch.nn.LazyLinear(64, device='cuda'), torch.nn.LazyLinear(8, device='cuda'))\n"
    "for step in range(5):\n"
    "    net(torch.randn(16, 64, device='cuda')).sum().backward()\n"
    "    with torch.no_grad():\n"
    "        for weight in net.parameters():\n"
    "            weight -= 0.1 * weight.grad\n"
    "            weight.grad = None\n"
)


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_updates_of_a_net_without_gradients_are_steps(device: str, tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, SAMPLE.read_text() + "torch.save(net.state_dict(), 'last.pt')\n", device=device)
    assert outcome.error is None
    assert outcome.windows == 6
    assert outcome.steps == ((f"{tmp_path / 'train.py'}:16", 6),)
    assert outcome.peak_bytes.keys() >= {"train", "save"}


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_updates_of_bare_tensors_are_steps(device: str, tmp_path: Path) -> None:
    assert trace_here(tmp_path, BARE, device=device).windows == 5


def test_an_optimizer_that_is_not_of_torch_steps_and_validation_follows(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, OWN_OPTIMIZER)
    assert outcome.windows == 6
    assert "validate" in outcome.peak_bytes


def test_a_write_to_weights_beside_an_optimizer_is_no_step(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Linear(64, 8).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(4):\n"
        "    net(torch.randn(16, 64).cuda()).sum().backward()\n"
        "    with torch.no_grad():\n"
        "        net.weight.mul_(0.99)\n"
        "    if step % 2:\n"
        "        optimizer.step()\n",
    )
    assert outcome.windows < 4


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_updates_of_lazy_modules_that_are_made_on_the_device_are_steps(device: str, tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, LAZY if device != "cpu" else LAZY.replace("'cuda'", "'cpu'"), device=device)
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 5
