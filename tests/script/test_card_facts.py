"""What a script's trace asks of its card: a script may read how much its calls took within themselves."""

from pathlib import Path

from tests.script.script_trace import trace_here

READS = """
import torch
from torch import nn

net = nn.Linear(8, 128).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    x = net(torch.randn(1, 2048, 8).cuda()).reshape(1, 2048, 16, 8).transpose(1, 2).half()
    nn.functional.scaled_dot_product_attention(x[:, :, :64], x, x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if torch.cuda.max_memory_allocated() > 1:
    print("much")
"""


def test_its_trace_is_shared_by_cards_of_the_same_scratch_alone(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, READS)
    assert outcome.error is None, outcome.error.text
    assert any(fact.startswith("flash_splits") for fact in outcome.facts)
    assert outcome.trace is not None
    assert any("flash_forward" in call for call in outcome.trace.card_calls)
