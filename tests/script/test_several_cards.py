"""Scripts that use more than one card in one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.device.virtual.assumptions import Assumptions
from memfit.script.failures import script_error
from tests.script.script_trace import trace_here

TEXT = """
import torch
from torch import nn

{nets}
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for _ in range(3):
    second(first(torch.randn(4, 64).to(card)).to(other)).sum().backward()
    optimizer.step()
"""
BY_HAND = """
card, other = "cuda:0", "cuda:1"
first, second = nn.Linear(64, 64).to(card), nn.Linear(64, 64).to(other)
"""
REPLICAS = """
card = other = "cuda"
first = nn.DataParallel(nn.Linear(64, 64).cuda(), device_ids=[0, 1, 2])
second = nn.Linear(64, 64).cuda()
"""
ONE = """
card = other = torch.device("cuda", 0)
first, second = nn.Linear(64, 64).to(card), nn.Linear(64, 64).cuda()
"""


@pytest.mark.parametrize(("nets", "named"), [(BY_HAND, "cuda:1"), (REPLICAS, "cuda:1, cuda:2"), (ONE, "")])
def test_the_answer_says_that_several_cards_were_counted_as_one(tmp_path: Path, nets: str, named: str) -> None:
    outcome = trace_here(tmp_path, TEXT.format(nets=nets))
    assert outcome.error is None, outcome.error.text
    said = f"several cards in one process: what {named} holds was counted on the same card as the rest"
    assert [line for line in outcome.not_seen if "several cards" in line] == ([said] if named else [])


def test_a_script_that_asks_for_more_cards_than_one_is_told_how_to_have_them() -> None:
    tracer: Any = SimpleNamespace(virtual=SimpleNamespace(assumptions=Assumptions()))
    error = RuntimeError("You requested gpu: [0, 1]\n But your machine only has: [0]")
    assert "--world" in script_error(error, tracer).hint
    assert not script_error(RuntimeError("the only cuda tensor"), tracer).hint
