"""What a traced script reads of its tensors: values and sizes, known or assumed."""

from pathlib import Path

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.show.footprint_table import verdict_line
from tests.script.script_trace import trace_here
from tests.script.test_training_loops import NET, STEP


def test_the_first_value_is_better_than_infinity(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "best, saves = float('inf'), 0\n"
        "for step in range(4):\n"
        f"    loss = net(torch.ones(4, 256).cuda()).sum(); {STEP}"
        "    if loss.detach() < best and not saves:\n"
        "        saves = 1\n"
        "        torch.save(net.state_dict(), 'best.pt')\n"
        "assert saves == 1 and not loss < -float('inf') and loss > -float('inf')\n",
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    assert "save" in outcome.footprint.phases
    line = next(answer for answer in outcome.assumed if answer.where.endswith(":8") and answer.answer == "True")
    assert line.operator == "item"


def test_a_tensor_of_the_card_prints_as_one_without_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace_here(tmp_path, NET + "loss = net(torch.ones(4, 256).cuda())\nprint(loss, f'{loss=}', [loss])\n")
    said = capfd.readouterr().out
    assert said.count("tensor(..., device='cuda:0', size=(4, 256), dtype=torch.float32)") == 3


def test_results_on_the_virtual_cpu_become_arrays(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import numpy, torch\n"
        "net = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(4, 8))\n"
        "    out.sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    assert out.detach().cpu().numpy().shape == numpy.asarray(out.detach()).shape == (4, 8)\n",
        device="cpu",
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_what_is_cast_from_unknown_values_is_unknown_and_no_memory_of_the_host(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(64, 64).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(64, 64).to(where))\n"
        "    loss = out.mean()\n"
        "    flags, classes = out > 0, out.argmax(1)\n"
        "    for cast in (out.double(), flags.float(), classes.half(), flags.long().type(torch.float32)):\n"
        "        assert cast.float().mean().item() == 0.5\n"
        f"    {STEP}",
        device=device,
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_a_count_of_hits_is_no_zero_so_that_the_best_weights_are_saved(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(64, 10).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "best = 0.0\n"
        "for step in range(3):\n"
        f"    loss = net(torch.randn(8, 64, device=where)).mean(); {STEP}\n"
        "    with torch.no_grad():\n"
        "        classes = net(torch.randn(8, 64, device=where)).argmax(1)\n"
        "        true = torch.randint(10, (8,), device=where)\n"
        "    hits, wrong = (classes == true).sum().item(), torch.count_nonzero(classes != true).item()\n"
        "    if hits / (hits + wrong) > best:\n"
        "        best = hits / (hits + wrong)\n"
        "        torch.save(net.state_dict(), 'best.pt')\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    assert "save" in outcome.footprint.phases


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
def test_ids_that_are_split_by_sizes_stay_where_they_are_and_are_views(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Embedding(16, 8).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "ids = torch.arange(12).view(2, 6).to(where)\n"
        "for step in range(3):\n"
        "    left, right = torch.split(ids, [2, 4], dim=1)\n"
        "    assert left.device == right.device == ids.device, left.device\n"
        "    assert right[0].tolist() == [2, 3, 4, 5] and right.storage_offset() == 2\n"
        "    loss = net(left).sum() + net(right).sum()\n"
        f"    {STEP}",
        device=device,
    )
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", ["rtx4090", "cpu"])
@pytest.mark.parametrize("voxels", [64, 100_000])
def test_predictions_read_on_the_host_hit_some_of_the_classes_but_not_all(
    tmp_path: Path, device: str, voxels: int
) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(8, 3).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "best = 0\n"
        f"labels = torch.arange({voxels}) // 2 % 3\n"
        "for step in range(3):\n"
        "    loss = torch.nn.functional.cross_entropy(net(torch.ones(4, 8).to(where)), labels[:4].to(where))\n"
        f"    {STEP}\n"
        "    with torch.no_grad():\n"
        f"        scores = net(torch.ones({voxels}, 8).to(where))\n"
        "        predicted, positive = scores.argmax(1).cpu(), (scores[:, 0] > 0).cpu()\n"
        "    both = ((predicted == 1) & (labels == 1)).sum().item()\n"
        "    dice = 2 * both / max((predicted == 1).sum().item() + (labels == 1).sum().item(), 1)\n"
        "    recall = (positive & (labels == 2)).sum().item() / (labels == 2).sum().item()\n"
        "    assert 0 < dice < 1 and 0 < recall < 1, (dice, recall)\n"
        f"    assert not (predicted == 1).all() and not positive.all()\n"
        "    if dice > best:\n"
        "        best = dice; torch.save(net.state_dict(), 'best.pt')\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    assert "save" in outcome.footprint.phases


def test_an_array_indexes_tensors_of_the_card_in_inference_mode(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "import numpy\n"
        "rows = numpy.arange(3)\n"
        "for step in range(3):\n"
        "    with torch.inference_mode():\n"
        "        out = net(torch.ones(4, 256, device='cuda'))\n"
        "        assert out[rows].shape == (3, 256) and torch.arange(4).cuda()[rows].tolist() == [0, 1, 2]\n"
        "        out[rows > 0] = 0\n"
        f"    loss = net(torch.ones(4, 256, device='cuda')).sum(); {STEP}",
    )
    assert outcome.error is None, outcome.error.text


def test_one_number_of_a_distribution_on_the_cpu_is_valid(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    loss = torch.distributions.Normal(net(torch.ones(1, 4)), 1.0).rsample().sum()\n"
        f"    {STEP}",
        device="cpu",
    )
    assert outcome.error is None, outcome.error.text


def test_data_that_a_script_writes_as_a_list_counts_on_the_cpu_and_an_array_does_not(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import numpy, torch\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "data = torch.tensor(list(range(100_000)))\n"
        "array = torch.as_tensor(numpy.zeros(10**7))\n"
        "for step in range(3):\n"
        f"    loss = net(torch.ones(1, 4)).sum(); {STEP}",
        device="cpu",
    )
    assert outcome.error is None, outcome.error.text
    assert 800_000 <= outcome.peak_bytes["train"] < 810_000


@pytest.mark.parametrize("window", [256, 512])
def test_a_spectrogram_is_inverted_on_the_card(tmp_path: Path, window: int) -> None:
    """``istft`` asks whether its windows leave a gap."""
    outcome = trace_here(
        tmp_path,
        NET + f"window = torch.hann_window({window}).cuda()\n"
        "for step in range(3):\n"
        "    waves = net(torch.ones(8, 256, device='cuda')).flatten()[None]\n"
        f"    spectrum = torch.stft(waves, {window}, 64, window=window, return_complex=True)\n"
        f"    loss = torch.istft(spectrum, {window}, 64, window=window, length=waves.shape[1]).sum()\n"
        f"    {STEP}",
    )
    assert outcome.error is None, outcome.error.text


def test_arrays_hold_the_memory_of_their_tensors_on_the_cpu(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Linear(64, 1000)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        f"    loss = net(torch.ones(1, 64)).sum(); {STEP}"
        "    net.eval()\n"
        "    with torch.no_grad():\n"
        "        kept = [net(torch.ones(200, 64)).numpy()[:100] for batch in range(10)]\n"
        "    net.train()\n",
        device="cpu",
    )
    assert outcome.error is None, outcome.error.text
    assert 8_000_000 <= outcome.peak_bytes["validate"] < 20_000_000


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_some_of_several_truth_values_hold_but_end_no_loop(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net, spline = (torch.nn.Linear(64, 64).to(device) for _ in range(2))\n"
        "optimizer = torch.optim.AdamW([*net.parameters(), *spline.parameters()])\n"
        "def transformed(x, inside):\n"
        "    if not torch.any(inside):\n"
        "        return x\n"
        "    return torch.where(inside, spline(x), x)\n"
        "seen, best = [], 0.0\n"
        "for step in range(3):\n"
        "    y = net(torch.randn(8, 64).to(device))\n"
        "    inside = y.abs() < 3\n"
        "    loss = transformed(y, inside).square().mean()\n"
        "    loss.backward()\n"
        "    assert spline.weight.grad is not None\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "    if not (inside.sum() > 0):\n"
        "        seen.append('none')\n"
        "    if loss > best:\n"
        "        seen.append('best'); best = 1.0\n"
        "    if inside.all():\n"
        "        seen.append('all')\n"
        "    if not inside.any():\n"
        "        break\n"
        "    if inside.any():\n"
        "        break\n"
        "    seen.append('next')\n"
        "while inside.any():\n"
        "    seen.append('turn')\n"
        "assert seen == ['best', 'next', 'next', 'next', 'turn'], seen\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
    ends = [answer.answer for answer in outcome.assumed if answer.operator == "the condition of a loop"]
    assert ends == ["False; a run may make more turns, and need more than predicted"]
    said = verdict_line(outcome.footprint, find_device(device))
    assert said.endswith(f" A run needs more if the loop at {tmp_path}/train.py:28 makes more turns than were traced.")


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_lengths_picked_by_unknown_scores_are_the_longest(tmp_path: Path, device: str) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(8, 1).to(device)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "lengths = torch.tensor([3, 9, 5, 7]).to(device)\n"
        "for step in range(3):\n"
        "    scores = net(torch.randn(4, 8).to(device)).view(-1)\n"
        "    scores.sum().backward(); optimizer.step()\n"
        "    picked = lengths[scores.topk(2)[1]]\n"
        "    assert int(picked.max()) == 9\n"
        "    assert int(torch.sort(picked)[0].max()) == 9\n"
        "    assert torch.arange(int(lengths.gather(0, torch.sort(scores)[1]).amax()) + 1).shape == (10,)\n"
        "    pooled = torch.full_like(picked, -1)\n"
        "    pooled.scatter_(0, scores.topk(2)[1] // 2, picked)\n"
        "    assert int(pooled.max()) + 1 == 10\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3


def test_a_script_that_fails_after_an_assumed_size_is_told_of_it(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Linear(8, 4).cuda()\n"
        "classes = int(net(torch.ones(16, 8).cuda()).argmax(1).max()) + 1\n"
        "torch.nn.functional.nll_loss(torch.zeros(classes, 4).cuda(), torch.zeros(3, dtype=torch.long).cuda())\n",
    )
    assert outcome.error is not None
    where = tmp_path / "train.py"
    assert outcome.error.hint == (
        f"a trace has no data: item at {where}:3 was taken to give 0; if a run gives another number, "
        f"write --assume {where}:3=N"
    )


def test_a_copy_to_the_meta_device_is_none_to_the_host(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        NET + "x = torch.ones(4, 256).cuda()\n"
        "assert x.to('meta').device.type == 'meta' and x.cpu().device.type == 'cpu'\n"
        "template = torch.nn.Linear(3, 2).cuda().to('meta')\n"
        "assert template.weight.device.type == 'meta'\n"
        "for step in range(2):\n"
        "    _, tangent = torch.func.jvp(net, (x,), (torch.ones_like(x),))\n"
        f"    loss = tangent.sum(); {STEP}",
    )
    assert outcome.error is None, outcome.error.text
