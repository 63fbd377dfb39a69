"""Passes over loaders that are cut short, and scripts that need them whole."""

from pathlib import Path

from tests.script.script_trace import trace_alone

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
