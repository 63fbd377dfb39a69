"""Scripts that select by one value after another, or count how often each is there, have an equal share for each."""

from pathlib import Path

import pytest

from memfit.script.outcome import ScriptOutcome
from tests.script.script_trace import trace_alone, trace_here

SAMPLE = (Path(__file__).parent / "samples" / "experts.py").read_text()
SHARE = "128, an equal share of 1,024 for each of 8 values"


def traced(folder: Path, how: str, **request: object) -> ScriptOutcome:
    text = SAMPLE.replace("sys.argv[1]", repr(how))
    outcome = trace_here(folder, text, device="cpu", memory_bytes=8 << 30, **request)
    assert outcome.error is None, outcome.error.text
    return outcome


@pytest.mark.parametrize("how", ["where", "one_hot", "scatter", "checkpoint"])
def test_experts_of_a_loop_get_equal_shares(how: str, tmp_path: Path) -> None:
    first = traced(tmp_path, how)
    ((_, experts),) = first.walks
    assert experts == 8
    again = traced(tmp_path, how, walks=first.walks)
    assert again.walks == first.walks
    assert again.peak_bytes["train"] < 0.6 * first.peak_bytes["train"]
    assert SHARE in [answer.answer for answer in again.assumed]


def test_a_script_is_traced_again_and_a_size_that_a_person_gives_is_taken(tmp_path: Path) -> None:
    text = SAMPLE.replace("sys.argv[1]", "'where'")
    assert SHARE in [answer.answer for answer in trace_alone(tmp_path, text).assumed]
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "torch.where(ids" in line)
    given = trace_alone(tmp_path, text, assumed=(("train.py", line, "100"),))
    assert "100, as given" in [answer.answer for answer in given.assumed]


@pytest.mark.parametrize("how", ["bincount", "sum", "scattered"])
def test_experts_get_equal_shares_of_tokens_that_are_cut_by_counts(how: str, tmp_path: Path) -> None:
    by_counts = traced(tmp_path, how)
    assert SHARE in [answer.answer for answer in by_counts.assumed]
    by_masks = traced(tmp_path, "where", walks=traced(tmp_path, "where").walks)
    assert by_counts.peak_bytes["train"] == pytest.approx(by_masks.peak_bytes["train"], rel=0.01)


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_each_of_unique_values_is_there_once(device: str, tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "where = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "net = torch.nn.Linear(8, 8).to(where)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    out = net(torch.randn(6, 8, device=where))\n"
        "    values, counts = out.argmax(1).unique(return_counts=True)\n"
        "    assert counts.tolist() == [1] * 6\n"
        "    sums = torch.stack([part.sum() for part in out.split(counts.tolist())])\n"
        "    sums.sum().backward(); optimizer.step(); optimizer.zero_grad()\n",
        device=device,
    )
    assert outcome.error is None, outcome.error.text


MANY = """
import torch
class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.weights = torch.nn.Linear(8, 64), torch.nn.Parameter(torch.randn(64, 8))
    def forward(self, x):
        ids, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number in range(64):
            if (ids == number).any():
                out = out + self.weights[number] * x
        return out
net = torch.nn.Sequential(*(Experts() for _ in range(20)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    for _ in range(3):
        net(torch.randn(64, 8)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_many_layers_ask_for_each_of_many_experts(tmp_path: Path) -> None:
    """11,520 times in one line; a loop that waits is found within one call of a layer."""
    outcome = trace_here(tmp_path, MANY, device="cpu")
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
    waits = MANY.replace(
        "        for number in range(64):\n", "        number, ids = 3, ids.float()\n        while True:\n"
    )
    waits = waits.replace(
        "if (ids == number).any():", "if (ids.sum() * 0.5).item() < 0: break\n            if step < 0:"
    )
    outcome = trace_here(tmp_path, waits, device="cpu")
    assert outcome.error is not None
    assert "item was asked 10,000 times" in outcome.error.text
