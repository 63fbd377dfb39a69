"""What a forward changes is put back: buffers from the start, other tensors from the window after their first change.

python -m pytest tests/apply/test_buffer_snapshot.py
"""

import pytest
import torch
from torch import nn

from memfit.apply.buffer_snapshot import BufferSnapshot, CannotRepeatError


def test_statistics_come_back_and_a_changed_parameter_is_named_and_then_learned():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    snapshot = BufferSnapshot({"net": net})
    snapshot.keep()
    assert snapshot.changed() == []
    before = net[1].running_mean.clone()
    net(torch.randn(4, 2) + 3)
    assert not torch.equal(net[1].running_mean, before)
    snapshot.restore()
    assert torch.equal(net[1].running_mean, before)

    weight = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight.add_(1)
    assert snapshot.changed() == ["net.0.weight"]
    with pytest.raises(CannotRepeatError, match=r"the forward changed net\.0\.weight"):
        snapshot.restore()
    snapshot.learn()
    snapshot.keep()
    with torch.no_grad():
        net[0].weight.add_(1)
    snapshot.restore()
    assert torch.equal(net[0].weight, weight + 1)
