"""Each result of a validation is better than the one before it in a trace: what a script keeps of the best is seen."""

from pathlib import Path

import pytest

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_here

SCRIPT = """
import copy
import numpy
import torch
from torch import nn
loader = torch.utils.data.DataLoader(torch.ones(64, 64), 2)
net = nn.Linear(64, 4096)
optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
class Best:
    score, state = {first}, None
best = Best()
for epoch in range(20):
    for batch in loader:
        optimizer.zero_grad(); net(batch).sum().backward(); optimizer.step()
    with torch.no_grad():
        score = {kind}(sum(net(batch).mean().item() for batch in loader) / len(loader))
    if {condition}:
        {body}
        best.state = copy.deepcopy(net.state_dict())
"""
WEIGHTS = 65 * 4096 * 4
"""Also the bytes of the gradients."""


@pytest.mark.parametrize(
    ("kind", "condition", "first", "body"),
    [
        ("float", "score > best.score", "-1.0", "best.score = score"),
        ("int", "score > best.score", "0", "best.score = score"),
        ("numpy.int64", "best.score < score", "-1", "best.score = score"),
        ("numpy.float32", "score < best.score - 0.001", "float('inf')", "best.score, wait = score, 0"),
        ("numpy.float64", "best.score is None or best.score < score", "None", "best.score = score"),
    ],
)
def test_the_next_best_weights_are_copied_beside_those_before(
    tmp_path: Path, kind: str, condition: str, first: str, body: str
) -> None:
    outcome = trace_here(tmp_path, SCRIPT.format(kind=kind, condition=condition, first=first, body=body), device="cpu")
    assert outcome.error is None
    assert outcome.bare is not None
    assert max(live_peaks(outcome.bare).values()) == pytest.approx(4 * WEIGHTS, rel=0.05)
    (line,) = (line for line in outcome.assumed if "best.score" in line.operator)
    assert condition.endswith(line.operator)
    assert (line.answer, line.decides_size) == ("True", False)


FORMS = {
    "a mean": "if numpy.mean(scores) > best: best = numpy.mean(scores); kept = copy.deepcopy(net)",
    "an item": "if torch.tensor(scores).mean().item() > best: best = torch.tensor(scores).mean().item(); "
    "kept = copy.deepcopy(net)",
    "a rounded number": "if round(scores[0], 4) > best: best = round(scores[0], 4); kept = copy.deepcopy(net)",
    "a tensor": "score = torch.tensor(scores).mean()\n    if score > best: best = score; kept = copy.deepcopy(net)",
    "a number of a tensor": "score = torch.tensor(scores).mean()\n"
    "    if score > best: best = score.item(); kept = copy.deepcopy(net)",
    "what the device has": "with torch.no_grad(): score = net(batch).mean()\n"
    "    if score > best: best = score.item(); kept = copy.deepcopy(net)",
    "named in the condition": "if (score := scores[0]) > best: best = score; kept = copy.deepcopy(net)",
    "a difference": "score = scores[0]\n    if score - best > 1e-4: best = score; kept = copy.deepcopy(net)",
    "a flag and the larger one": "score = scores[0]\n    is_best = score > best\n    best = max(score, best)\n"
    "    if is_best: kept = copy.deepcopy(net)",
    "a flag": "score = scores[0]\n    is_best = score > best\n    if is_best: best = score; kept = copy.deepcopy(net)",
    "otherwise": "score = scores[0]\n    if score <= best: wait = 1\n    else: best = score; kept = copy.deepcopy(net)",
    "otherwise, by a margin": "score = scores[0]\n    if score < best + 0.01: waited = 1\n"
    "    else: best = score; kept = copy.deepcopy(net)",
    "not": "score = scores[0]\n    if not score <= best: best = score; kept = copy.deepcopy(net)",
    "the next epoch": "score = scores[0]\n    if score <= best: continue\n    best = score; kept = copy.deepcopy(net)",
    "an expression": "score = scores[0]\n    kept = copy.deepcopy(net) if score > best else kept\n"
    "    best = max(best, score)",
    "the smaller one": "score = scores[0]; better = -best > -score\n    worst = min(best, score)\n"
    "    if score > best: best = score; kept = copy.deepcopy(net)",
}
FORM = """
import copy
import numpy
import torch
from torch import nn
loader = torch.utils.data.DataLoader(torch.ones(64, 64), 2)
net = nn.Linear(64, 4096)
optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
best, kept = -1.0, None
for epoch in range(20):
    for batch in loader:
        optimizer.zero_grad(); net(batch).sum().backward(); optimizer.step()
    with torch.no_grad():
        scores = [net(batch).mean().item() for batch in loader]
    {form}
"""


@pytest.mark.parametrize("form", FORMS)
def test_the_next_best_net_is_copied_however_it_is_compared(tmp_path: Path, form: str) -> None:
    outcome = trace_here(tmp_path, FORM.format(form=FORMS[form]), device="cpu")
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert max(live_peaks(outcome.bare).values()) == pytest.approx(4 * WEIGHTS, rel=0.05)


def test_the_answer_of_a_comparison_that_a_worse_result_meets_is_false(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, FORM.format(form=FORMS["otherwise"]), device="cpu")
    (line,) = (line for line in outcome.assumed if "best" in line.operator)
    assert (line.operator, line.answer) == ("score <= best", "False")


def test_a_comparison_with_what_is_not_replaced_is_left_as_it_is(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path, SCRIPT.format(kind="float", condition="score > best.score", first="0.5", body="pass"), device="cpu"
    )
    assert outcome.error is None
    assert outcome.bare is not None
    assert max(live_peaks(outcome.bare).values()) < 2.5 * WEIGHTS
    assert not [line for line in outcome.assumed if "best" in line.operator]


BUFFER = """
import torch
from torch import nn
loader = torch.utils.data.DataLoader(torch.ones(64, 64), 2)
net = nn.Linear(64, 4096)
optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
most, places = 0, None
for epoch in range(3):
    for batch in loader:
        rows = len(batch)
        if rows > most:
            most = rows
            places = torch.zeros(rows, 1 << 20)
        optimizer.zero_grad(); net(batch).sum().backward(); optimizer.step()
"""


def test_a_buffer_for_the_most_rows_so_far_is_made_once(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, BUFFER, device="cpu")
    assert outcome.bare is not None
    assert max(live_peaks(outcome.bare).values()) < 1.5 * (2 * 4 << 20)
    assert not [line for line in outcome.assumed if "most" in line.operator]
