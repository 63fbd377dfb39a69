"""``x[mask] = values`` in scripts: what it allocates, where the mask is known and where it is not."""

from pathlib import Path

from memfit.show.script_table import script_remarks
from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_here

HEAD = (
    "import torch\n"
    "net = torch.nn.Linear(64, 64).cuda()\n"
    "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
    "known = torch.arange(64000).view(1000, 64).cuda() % 2 == 0\n"
    "for step in range(3):\n"
    "    x = net(torch.randn(1000, 64).cuda()) * 1\n"
    "    unknown = x.detach() > 0\n"
)
TAIL = "    x.sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
POSITIONS = 64000 * 2 * 8


def peak(folder: Path, line: str) -> int:
    outcome = trace_here(folder, HEAD + f"    {line}\n" + TAIL)
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    return live_peaks(outcome.bare)["train"]


def test_one_number_is_filled_in_without_indices(tmp_path: Path) -> None:
    assert peak(tmp_path, "x[known] = 0.0") == peak(tmp_path, "x.masked_fill_(known, 0.0)")
    assert peak(tmp_path, "x[unknown] = 0.0") == peak(tmp_path, "x.masked_fill_(unknown, 0.0)")


def test_values_of_an_unknown_mask_make_indices(tmp_path: Path) -> None:
    values = "torch.ones(64000, device='cuda')"
    without = peak(tmp_path, f"x = x + {values}.view(1000, 64)")
    assert peak(tmp_path, f"x[unknown] = {values}") > without + POSITIONS // 2


def test_what_a_backward_assumes_says_so(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "net = torch.nn.Linear(64, 64).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    out = net(torch.ones(16, 64).cuda())\n"
        "    kept = torch.zeros_like(out)\n"
        "    kept[out > 0] = out[out > 0]\n"
        "    kept.sum().backward(); optimizer.step()\n",
    )
    remarks = script_remarks(outcome)
    assert "Assumed in a backward: index by a mask gives all 1024." in remarks
