"""What masks select in a traced script: as many rows as known ones say, and else all of them."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here
from tests.script.test_training_loops import NET, STEP


def test_a_mask_of_known_ids_selects_as_many_rows_as_it_has(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "ids = torch.tensor([[1, 2, 3, 0, 0, 0]] * 4).cuda()\n"
        "mask = ids != 0\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(4, 6, 256).cuda())\n"
        "    assert out[mask].shape == (12, 256) and ids[mask].shape == (12,)\n"
        "    assert torch.where(mask)[0].shape == mask.nonzero()[:, 0].shape == (12,)\n"
        f"    loss = out[mask].sum(); {STEP}",
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_what_is_not_recorded_follows_known_values_too(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "from memfit.device.virtual.fake_group import unrecorded\n"
        "dist.init_process_group('gloo')\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(8, 1).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    ids = torch.tensor([[1, 7, 7, 7], [7, 7, 2, 3]]).to(where)\n"
        "    with unrecorded():\n"
        "        mask = ids == 7\n"
        "        rows = torch.ones(2, 4, 8, device=where) * net.weight\n"
        "        assert mask.sum().item() == 5 and int(mask.sum(-1).max()) == 3\n"
        "        assert rows[mask].shape == (5, 8) and torch.where(mask)[0].shape == (5,)\n"
        "        assert torch.bincount(ids.flatten()).shape == (8,)\n"
        "    loss = net(torch.ones(4, 8, device=where)).sum()\n"
        f"    {STEP}",
        device=device,
        world=2,
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_masked_select_by_a_known_mask_takes_as_many_of_a_net_as_of_data(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(8, 1).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "lengths = torch.tensor([2, 5, 3])\n"
        "spans = torch.arange(15).view(3, 5)\n"
        "for step in range(3):\n"
        "    known = torch.arange(5).to(where)[None] < lengths.to(where)[:, None]\n"
        "    out = net(torch.ones(3, 5, 8).to(where))\n"
        "    chosen, target = out.squeeze(-1).masked_select(known), spans.to(where).float().masked_select(known)\n"
        "    assert chosen.shape == target.shape == (10,) and out.masked_select(known[..., None]).shape == (10,)\n"
        "    assert torch.bincount(lengths.to(where), out.detach()[:, 0, 0]).shape == (6,)\n"
        "    loss = (chosen - target).square().sum()\n"
        f"    {STEP}",
        device=device,
    )
    assert outcome.error is None, outcome.error.text


def test_values_that_a_mask_selects_on_the_cpu_are_those_of_a_trace_and_no_memory_of_the_host(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(64, 64))\n"
        "    loss = out.masked_select(out > 0).mean()\n"
        "    assert loss.item() == 0.5\n"
        f"    {STEP}",
        device="cpu",
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("masked", ["row[m]", "row.masked_select(m)", "row[m.nonzero()[:, 0]]"])
def test_rows_that_a_mask_from_the_card_cuts_on_the_host_keep_their_largest_length(tmp_path: Path, masked: str) -> None:
    """A trainer that generates text (TRL's GRPOTrainer) cuts each text at its end so, and pads the texts again: half of
    their tokens were left, and memory was too low. A metric's masks still hold for some and not for all."""
    outcome = trace_here(
        tmp_path,
        NET + "for step in range(3):\n"
        "    tokens = net(torch.ones(4, 24, 256).cuda()).argmax(-1)\n"
        "    before = (torch.cumsum((tokens == 3).int(), 1) == 0).int()\n"
        f"    rows = [{masked}.tolist() for row, m in zip(tokens.cpu(), before.bool().cpu())]\n"
        "    assert [len(row) for row in rows] == [24] * 4\n"
        f"    rows = [{masked}.tolist() for row, m in zip(tokens.cpu(), before.cpu().bool())]\n"
        "    assert [len(row) for row in rows] == [24] * 4\n"
        "    hits = (tokens == 3).cpu()\n"
        "    assert 0 < hits.sum() < hits.numel()\n"
        "    loss = net(torch.ones(4, max(map(len, rows)), 256).cuda()).sum()\n"
        f"    {STEP}",
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_mask_of_images_is_known_after_it_is_resized_as_numbers(device: str, tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Conv2d(3, 8, 8, 8).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "mask = torch.ones(2, 64, 64, dtype=torch.long)\n"
        "mask[1, :, 48:] = 0\n"
        "for step in range(3):\n"
        "    out = net(torch.randn(2, 3, 64, 64, device=where))\n"
        "    there = torch.nn.functional.interpolate(mask.to(where)[:, None].float(), size=(8, 8)).long()[:, 0]\n"
        "    assert there[:, 0].sum(1).tolist() == [8, 6]\n"
        "    rows = [out[image][:, there[image].bool()] for image in range(2)]\n"
        "    assert [row.shape for row in rows] == [(8, 64), (8, 48)]\n"
        "    (rows[0].sum() + rows[1].sum()).backward(); optimizer.step(); optimizer.zero_grad()\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("rows", [40, 60, 900])
def test_rows_of_a_table_from_the_host_are_selected_by_one_of_its_columns(rows: int, tmp_path: Path) -> None:
    """As a detector's boxes are by the number of their image, which is a floating point number as the boxes are."""
    outcome = trace_here(
        tmp_path,
        NET + f"table = torch.rand({rows}, 6)\n"
        f"table[:, 0] = torch.arange({rows}) // 20\n"
        "for step in range(3):\n"
        "    boxes = table.to('cuda', non_blocking=True)\n"
        f"    padded = torch.zeros({rows} // 20, 20, 5).cuda()\n"
        f"    for i in range({rows} // 20):\n"
        "        chosen = boxes[:, 0] == i\n"
        "        assert int(chosen.sum()) == 20 and boxes[chosen, 1:].shape == (20, 5)\n"
        "        padded[i, : int(chosen.sum())] = boxes[chosen, 1:]\n"
        f"    loss = net(torch.ones(4, 256).cuda()).sum(); {STEP}",
    )
    assert outcome.error is None, outcome.error.text


def test_a_mask_that_the_backward_selects_by_is_named_as_its(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "for step in range(3):\n"
        "    out = net(torch.randn(4, 256).cuda())\n"
        "    kept = torch.zeros(4, 256).cuda()\n"
        "    mask = torch.rand(4, 256, device='cuda') > 0.5\n"
        "    kept[mask] = out[mask]\n"
        f"    loss = kept.sum(); {STEP}",
    )
    assert outcome.trace is not None
    assert [line for line in outcome.trace.assumed if line.startswith("the backward: index by a mask was taken")]
    assert not [line for line in outcome.trace.assumed if line.startswith(":")]
