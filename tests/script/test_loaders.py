"""Passes over loaders that are cut short, and scripts that need them whole."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_alone, trace_here

COLLECTED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = torch.randn(40, 256)
net, teacher = nn.Linear(256, 256).cuda(), nn.Linear(256, 256).cuda()
with torch.no_grad():
    kept = [teacher(x.cuda()){where} for x, in DataLoader(TensorDataset(data), batch_size=4)]
goals = torch.cat(kept)
optimizer = torch.optim.AdamW(net.parameters())
for index in torch.randperm(40, generator=torch.Generator().manual_seed(0)).split(8):
    goal = torch.stack([goals[number] for number in index.tolist()]).cuda()
    loss = (net(data[index].cuda()) - goal).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(net.state_dict(), "net.pt")
"""


def test_a_script_that_fails_without_what_a_pass_collects_is_traced_with_whole_passes(tmp_path: Path) -> None:
    for where in ("", ".cpu()"):
        outcome = trace_alone(tmp_path, COLLECTED.format(where=where), unsafe_writes=True)
        assert outcome.error is None, outcome.error.text
        assert outcome.windows >= 2
        assert not outcome.passes_cut


def test_a_script_that_fails_by_itself_is_answered_with_its_own_error(tmp_path: Path) -> None:
    text = COLLECTED.format(where="").replace("optimizer = ", "raise ValueError('no optimizer')\noptimizer = ")
    outcome = trace_alone(tmp_path, text, unsafe_writes=True)
    assert outcome.error is not None
    assert outcome.error.summary.endswith("no optimizer")


ACCUMULATED = """
import torch
net = torch.nn.Linear(64, 4096)
optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
loader = torch.utils.data.DataLoader(torch.ones(8 * {batches}, 64), 8)
def one_ahead():
    batches = iter(loader)
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last
for epoch in range(8):
    for number, batch in enumerate(one_ahead()):
        net(batch).sum().backward()
        if (number + 1) % {accumulated} == 0{last}:
            optimizer.step(); optimizer.zero_grad()
    with torch.no_grad():
        net(batch)
    torch.save(net.state_dict(), "net.pt")
"""
WEIGHTS = 65 * 4096 * 4


@pytest.mark.parametrize(("accumulated", "batches"), [(2, 48), (3, 48), (8, 48), (2, 49), (3, 50)])
def test_a_short_pass_leaves_gradients_where_a_whole_one_does(tmp_path: Path, accumulated: int, batches: int) -> None:
    text = ACCUMULATED.format(accumulated=accumulated, batches=batches, last="")
    outcome = trace_here(tmp_path, text, device="cpu")
    left_over = bool(batches % accumulated)
    assert outcome.peak_bytes["save"] == pytest.approx((1 + left_over) * WEIGHTS, rel=0.2)


@pytest.mark.parametrize("batches", [48, 49])
def test_a_script_that_steps_with_the_last_batch_leaves_no_gradients(tmp_path: Path, batches: int) -> None:
    text = ACCUMULATED.format(accumulated=2, batches=batches, last=" or number + 1 == len(loader)")
    outcome = trace_here(tmp_path, text.replace("one_ahead()):", "loader):"), device="cpu")
    assert outcome.peak_bytes["save"] == pytest.approx(WEIGHTS, rel=0.2)
