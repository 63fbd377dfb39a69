"""Scripts that validate in inference mode."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

VIEWS = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
token = nn.Parameter(torch.zeros(1, 1, 24).to(device))
net = nn.Linear(24, 24).to(device)
optimizer = torch.optim.SGD([token, *net.parameters()], 0.1)
for size in (7, 11, 13):
    net(token * 2).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        tokens, rows, parts = token.expand(size, -1, -1), net.weight[:size], net.weight.split(size)
        assert [view.is_inference() for view in (tokens, rows, *parts)] == [False] * (2 + len(parts))
        assert tokens.requires_grad and tokens.grad_fn is None and net(tokens).is_inference()
torch.save(net.state_dict(), "net.pt")
"""


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_a_view_of_a_parameter_is_traced_where_no_such_view_was_made_before(tmp_path: Path, device: str) -> None:
    """As a vision transformer's class token, which is expanded to a batch of another size in validation."""
    outcome = trace_here(tmp_path, VIEWS, device=device)
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3
