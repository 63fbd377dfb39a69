"""Parameters that FSDP2 gathers in a script on the virtual CPU, where tensors of known content are real.

python -m pytest tests/script/test_gathered_parameters.py
"""

from pathlib import Path

import pytest

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_here

WIDTH = 256
SHARDED = f"""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
net = torch.nn.Sequential(*[torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(BLOCKS)])
for block in net:
    fully_shard(block)
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    loss = net(torch.ones(1, {WIDTH})).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_block_is_dropped_after_its_forward(tmp_path: Path) -> None:
    peaks = []
    for blocks in (4, 8):
        outcome = trace_here(tmp_path, SHARDED.replace("BLOCKS", str(blocks)), device="cpu", world=2)
        assert outcome.error is None, outcome.error.text
        assert outcome.bare is not None
        peaks.append(live_peaks(outcome.bare)["train"])
    block = 4 * WIDTH * WIDTH
    assert peaks[1] - peaks[0] == pytest.approx(4 * block, rel=0.05), "half of each block, and of its gradient"
