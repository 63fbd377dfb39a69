"""Graphs of neighbours that a script makes on the card of points of the host have the edges of a real run."""

from pathlib import Path

import pytest
import torch

from tests.script.script_trace import trace_here

SCRIPT = """
import torch
net = torch.nn.Linear(6, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    torch.manual_seed(step)
    points = torch.randn(300, 3)
    x = points.cuda().requires_grad_()
    d = {distances}
    edges = {edges}
    print("edges", step, tuple(edges.shape))
    ends = torch.cat([x[edges[:, 0]], x[edges[:, 1]]], 1)
    optimizer.zero_grad(); net(ends).sum().backward(); optimizer.step()
"""
NEAR = "((d < 1.5) & ~torch.eye(300, dtype=torch.bool, device='cuda')).nonzero()"


@pytest.mark.parametrize(
    ("distances", "edges"),
    [
        ("torch.cdist(x.detach(), x.detach())", NEAR),
        ("(x.detach()[:, None] - x.detach()[None]).norm(dim=-1)", NEAR),
        ("(x.detach()[:, None] - x.detach()[None]).pow(2).sum(-1).sqrt()", NEAR),
        ("torch.cdist(x.detach(), x.detach())", "torch.stack(torch.where(d < d.topk(4, largest=False)[0][:, -1:]), 1)"),
    ],
)
def test_points_of_the_host_have_their_edges(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], distances: str, edges: str
) -> None:
    outcome = trace_here(tmp_path, SCRIPT.format(distances=distances, edges=edges))
    assert outcome.error is None, outcome.error.text
    traced = [line for line in capfd.readouterr().out.splitlines() if line.startswith("edges")]
    assert len(traced) == 3
    for step, line in enumerate(traced):
        torch.manual_seed(step)
        real = {"x": torch.randn(300, 3), "torch": torch}
        real["d"] = eval(distances, real)
        assert line == f"edges {step} {tuple(eval(edges.replace('cuda', 'cpu'), real).shape)}"
