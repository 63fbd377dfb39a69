"""Process groups whose ranks no launcher of the command names."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

TEXT = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("{backend}", rank=0, world_size={world}, init_method="tcp://127.0.0.1:29511")
net = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(4, 256).cuda()).sum().backward()
    optimizer.step()
torch.save(net.state_dict(), "net.pt")
"""


@pytest.mark.parametrize(("backend", "world", "joined"), [("nccl", 2, 2), ("nccl", 1, 1), ("gloo", 2, 1)])
def test_the_memory_of_nccl_is_counted_where_the_script_joins_ranks_itself(
    tmp_path: Path, backend: str, world: int, joined: int
) -> None:
    """As ``accelerate launch``, which sets the ranks by itself, or a script that spawns them."""
    outcome = trace_here(tmp_path, TEXT.format(backend=backend, world=world))
    assert outcome.error is None, outcome.error.text
    assert outcome.world == joined
    assert outcome.footprint is not None
    train = outcome.footprint.phases["train"]
    assert (train.process_bytes - train.reserved_bytes > 700 << 20) == (joined > 1)
