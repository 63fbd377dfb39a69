"""How many values integers have whose numbers are not known, but between which numbers they lie."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

SCRIPT = """
import torch
from torch import nn

device = {device!r}
net = nn.Linear(32, 10).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
classes = torch.randint(0, 10, (64,)).to(device)
for step in range(4):
    scores = net(torch.randn(64, 32).to(device))
    {check}
    nn.functional.cross_entropy(scores, classes).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DEVICES = [("cuda", "rtx4090"), ("cpu", "cpu")]


@pytest.mark.parametrize("device", DEVICES, ids=["card", "cpu"])
@pytest.mark.parametrize(
    ("check", "most"),
    [
        ("seen = scores.argmax(1).unique()", 10),
        ("seen = torch.max(scores, 1)[1].view(8, 8).int().unique()", 10),
        ("seen = torch.unique(torch.cat([scores.argmax(-1), classes]))", 10),
        ("seen = torch.unique(torch.cat([scores.argmax(-1), classes + 90]))", 100),
        ("seen = scores.topk(3, 1).indices[scores[:, 0] > 0].unique()", 10),
        ("seen = (scores > 0).long().unique()", 2),
        ("seen = scores.sort(dim=0).indices.unique()", 64),
        ("seen = torch.multinomial(scores.softmax(1), 2, True).flatten().unique()", 10),
        ("guess = scores.argmax(1); guess[scores[:, 0] > 0] = 99; seen = guess.unique()", 64),
        ("seen = scores.argmax(1).bincount()", 10),
    ],
)
def test_integers_have_no_more_values_than_numbers_that_they_lie_between(
    check: str, most: int, device: tuple[str, str], tmp_path: Path
) -> None:
    asserted = f"{check}; assert len(seen) == {most}, seen.shape"
    outcome = trace_here(tmp_path, SCRIPT.format(device=device[0], check=asserted), device=device[1])
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 4


@pytest.mark.parametrize("device", DEVICES, ids=["card", "cpu"])
def test_values_of_a_range_that_are_all_there_are_known_and_have_equal_shares(
    device: tuple[str, str], tmp_path: Path
) -> None:
    check = (
        "values, times = scores.argmax(1).unique(return_counts=True);"
        " assert values.tolist() == list(range(10)); assert sorted(times.tolist()) == 6 * [6] + 4 * [7]"
    )
    outcome = trace_here(tmp_path, SCRIPT.format(device=device[0], check=check), device=device[1])
    assert outcome.error is None, outcome.error.text


@pytest.mark.parametrize("device", DEVICES, ids=["card", "cpu"])
def test_a_metric_that_counts_the_classes_of_predictions_is_traced(device: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    metric = (
        "from torchmetrics.functional.classification import multiclass_accuracy as accuracy;"
        " accuracy(scores.argmax(1), classes, num_classes=10)"
    )
    outcome = trace_here(tmp_path, SCRIPT.format(device=device[0], check=metric), device=device[1])
    assert outcome.error is None, outcome.error.text
