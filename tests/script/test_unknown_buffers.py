"""Buffers of a traced script that something unknown is written to, on the virtual CPU: masks of them say no sizes."""

from pathlib import Path

import pytest

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import real_peaks, trace_here

SETUP = (
    "import torch\n"
    "net = torch.nn.Linear(8, 1)\n"
    "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
)  # fmt: skip
STEP = "    loss = out.sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()\n"


def test_an_occupancy_grid_has_the_bytes_of_a_real_run(tmp_path: Path) -> None:
    """The grid was 0.5 everywhere, so that no cell was above the mean: a step took a quarter of its memory."""
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "from torch import nn\n"
        "net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1), nn.Softplus())\n"
        "optimizer = torch.optim.SGD(net.parameters(), 1e-6)\n"
        "ema, bits = torch.zeros(512), torch.ones(512, dtype=torch.bool)\n"
        "for step in range(4):\n"
        "    with torch.no_grad():\n"
        "        ema.copy_(torch.maximum(ema * 0.9, net(torch.rand(512, 3))[:, 0]))\n"
        "        bits.copy_(ema > ema.mean().clamp(max=0.01))\n"
        "    places = torch.rand(256, 16, 3, generator=torch.Generator().manual_seed(step)) * 1.2\n"
        "    cells = (places * 8).long().clamp(0, 7)\n"
        "    hit = bits[cells[..., 0] * 64 + cells[..., 1] * 8 + cells[..., 2]] & (places < 1).all(-1)\n"
        "    ray, sample = hit.nonzero(as_tuple=True)\n"
        "    density = torch.zeros(256, 16)\n"
        "    density[ray, sample] = net(places[hit])[:, 0]\n"
        "    loss = (1 - (-density).exp()).mean()\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    del places, cells, hit, ray, sample, density, loss\n",
        device="cpu",
        memory_bytes=1 << 30,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert any("nonzero was taken to find all" in line for line in outcome.bare.assumed)
    real = real_peaks(tmp_path, outcome.bare)
    assert live_peaks(outcome.bare)["train"] == pytest.approx(real["train"], rel=100e-6)


def test_masks_of_what_a_net_was_written_to_select_all(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        SETUP + "ema, bits, table = torch.zeros(64), torch.ones(64, dtype=torch.bool), torch.zeros(64, 3)\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(64, 8))\n"
        "    ema.mul_(0.9).add_(out.detach()[:, 0])\n"
        "    mask = ema > ema.mean()\n"
        "    bits.copy_(mask)\n"
        "    assert mask.any() and torch.isfinite(ema).all() and not torch.isnan(ema).any()\n"
        "    assert mask.nonzero().shape == bits.nonzero().shape == (64, 1)\n"
        "    places = torch.arange(64)\n"
        "    assert out[bits].shape == (64, 1) and places[bits].shape == torch.where(bits)[0].shape == (64,)\n"
        "    assert bits.view(8, 8)[0].nonzero().shape == (8, 1)\n"
        "    assert places[bits & (places < 5)].shape == (5,)\n"
        "    table[torch.arange(4)] = out[:4].detach().expand(4, 3)\n"
        "    assert table[(table > 0.1).any(1)].shape == (64, 3) and table.unique().shape == (192,)\n"
        "    assert table.masked_select(bits[:, None]).shape == (192,)\n" + STEP,
        device="cpu",
        memory_bytes=1 << 30,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert any("train.py:11: nonzero was taken to find all 64" in line for line in outcome.bare.assumed)


def test_what_is_overwritten_by_known_values_is_known_again(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        SETUP + "table, seen = torch.zeros(16, 3), torch.zeros(16, dtype=torch.bool)\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(64, 8))\n"
        "    table.copy_(out.detach()[:16].expand(16, 3))\n"
        "    table.copy_(torch.arange(48.).view(16, 3))\n"
        "    assert table[table > 40].shape == (7,)\n"
        "    seen[step] = True\n"
        "    assert seen.nonzero().shape == (step + 1, 1)\n" + STEP,
        device="cpu",
        memory_bytes=1 << 30,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert not outcome.bare.assumed


def test_numbers_read_from_such_a_buffer_stay_what_they_were(tmp_path: Path) -> None:
    """An integer may be a size, so that it is named."""
    outcome = trace_here(
        tmp_path,
        SETUP + "average, hits = torch.zeros(64), torch.zeros((), dtype=torch.int64)\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(64, 8))\n"
        "    average.copy_(out.detach()[:, 0])\n"
        "    assert average.mean().item() == 0.5 and not average.mean() > 0.6 and average.sum() > 1\n"
        "    hits += (out > 0).sum()\n"
        "    assert hits.item() == 0\n" + STEP,
        device="cpu",
        memory_bytes=1 << 30,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert any("train.py:10: item() was answered 0" in line for line in outcome.bare.assumed)
