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


MOVES = """
import torch
from torch import nn

net = nn.Linear(24, 24).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
host = torch.ones(5, 7, dtype=torch.int64)
for _ in range(3):
    net(torch.randn(2, 24).cuda()).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        card = host.to("cuda")
        moved = [
            host.to(device="cuda", dtype=torch.bool), card.to(device=card.device, dtype=torch.bool),
            host.to(net.weight), card.to(net.weight), host.to(card.device, torch.float16, copy=True),
            card.reshape(7, 5), card.t().flatten(),
        ]
        assert all(tensor.is_cuda for tensor in moved)
        assert moved[0].dtype is torch.bool and moved[2].dtype is torch.float32
        assert card.to(device="cuda", dtype=torch.int64) is card
torch.save(net.state_dict(), "net.pt")
"""


def test_a_tensor_is_moved_to_a_device_and_a_type_at_once(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, MOVES)
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3


ENCODER = """
import torch
from torch import nn
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).to(device)
optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
mask = torch.arange(20)[None].expand(4, 20) >= 15
for step in range(3):
    encoder.train()
    x = torch.randn(4, 20, 32)
    encoder(x.to(device), src_key_padding_mask=mask.to(device)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
    encoder.eval()
    with torch.no_grad():
        assert encoder(x.to(device), src_key_padding_mask=mask.to(device)).shape == (4, 20, 32)
"""


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_an_encoder_is_evaluated_with_its_padding(device: str, tmp_path: Path) -> None:
    """Its weights are fake, and a batch on the CPU is real: a real nested tensor has no place in a trace."""
    where = "cpu" if device == "cpu" else "cuda"
    outcome = trace_here(tmp_path, f"device = {where!r}" + ENCODER, device=device)
    assert outcome.error is None, outcome.error.text
    assert "validate" in outcome.peak_bytes
