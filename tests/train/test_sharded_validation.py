"""A validation under FSDP2 leaves the weights as the window before it did: in parts, and ready to be put back.

python -m pytest tests/train/test_sharded_validation.py
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from memfit.apply.buffer_snapshot import BufferSnapshot
from memfit.apply.train_state import build
from memfit.engine.factory import make_engine
from memfit.trace.step_phases import validate_once
from testing.faulty_jobs import Plain


@pytest.fixture
def train_state():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build(Plain(), "cpu", make_engine("fsdp2", torch.device("cpu")))
    dist.destroy_process_group()


def test_windows_and_validations_in_turn_change_no_weight_by_themselves(train_state):
    net, samples = train_state.nets["net"], Plain().dataset()
    batch = [torch.stack(part) for part in zip(*samples, strict=True)]
    snapshot = BufferSnapshot(train_state.nets)
    for _ in range(3):
        validate_once(train_state, lambda: batch, lambda part: None)
        assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
        snapshot.keep()
        (net(batch[0]).squeeze(-1) - batch[1]).square().sum().backward()
        assert snapshot.changed() == []
        snapshot.restore()
        snapshot.learn()
