"""Steps of other sizes than those that ran are named as not seen."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

SCRIPT = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(6):
    rows = {rows}
    net(torch.ones(rows, 64).cuda()).square().sum().backward()
    optimizer.step(); optimizer.zero_grad()
    if step == 3:
        with torch.no_grad():
            net.eval(); net(torch.ones(4000, 64).cuda()); net.train()
"""


@pytest.mark.parametrize(
    ("rows", "differ"),
    [("1000", False), ("(1000, 300)[step % 3 == 2]", False), ("1000 + step * 173 % 700", True)],
)
def test_larger_batches_are_not_seen_where_no_two_steps_are_as_large(tmp_path: Path, rows: str, differ: bool) -> None:
    outcome = trace_here(tmp_path, SCRIPT.format(rows=rows))
    assert outcome.error is None, outcome.error.text
    larger = [line for line in outcome.not_seen if line.startswith("steps of larger batches than the 6 that ran")]
    assert bool(larger) is differ


def test_a_forward_before_the_training_is_no_larger_step(tmp_path: Path) -> None:
    text = SCRIPT.format(rows="1000").replace("for step", "print(net(torch.ones(300, 64).cuda()).shape)\nfor step", 1)
    outcome = trace_here(tmp_path, text)
    assert outcome.windows == 6
    assert not [line for line in outcome.not_seen if "larger batches" in line]


ACCUMULATED = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    rows = {rows}
    net(torch.ones(rows, 64).cuda()).square().sum().backward()
    if step % 2:
        optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rows", "differ"), [("1000", False), ("(1000, 300)[step == 3]", False), ("1000 + step * 173 % 700", True)]
)
def test_the_micro_batches_of_a_few_steps_are_compared(tmp_path: Path, rows: str, differ: bool) -> None:
    outcome = trace_here(tmp_path, ACCUMULATED.format(rows=rows))
    assert outcome.windows == 2
    larger = [line for line in outcome.not_seen if line.startswith("larger micro-batches than the 4 that ran")]
    assert bool(larger) is differ


def test_steps_of_more_micro_batches_have_no_larger_ones(tmp_path: Path) -> None:
    """As where a trainer accumulates three, and ends the pass with what is left."""
    text = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for times in (3, 1, 2, 1, 2):
    for micro in range(times):
        net(torch.ones(1000, 64).cuda()).square().sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    outcome = trace_here(tmp_path, text)
    assert outcome.windows == 5
    assert not [line for line in outcome.not_seen if "larger" in line]
