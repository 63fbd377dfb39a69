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


class Moody(nn.Module):
    """Changes its mode, replaces a buffer and drops one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("cache", None)
        self.weight = nn.Parameter(torch.ones(2))


def test_what_is_copied_follows_the_modes_of_modules_and_what_they_hold():
    net = Moody().eval()
    snapshot = BufferSnapshot({"net": net})
    snapshot.keep()
    net.seen.add_(1)
    assert snapshot.changed() == ["net.seen"]  # no copy: the module does not train
    net.train()
    snapshot.keep()
    net.seen.add_(1)
    net.cache = torch.ones(3)
    snapshot.restore()
    assert net.seen.tolist() == [1, 1]
    assert net.cache is None

    net.cache = torch.ones(3)
    snapshot.keep()
    net.cache = None
    snapshot.restore()
    assert net.cache.tolist() == [1, 1, 1]

    snapshot.keep()
    net.weight = nn.Parameter(torch.ones(2))
    assert snapshot.changed() == ["net.weight"]
    snapshot.watch()
    assert snapshot.changed() == []


class Counts(nn.Module):
    """Counts its forwards in what no tensor holds, and says so as torch's modules do."""

    def __init__(self):
        super().__init__()
        self.count, self.history = 0, []

    def get_extra_state(self):
        return {"count": self.count, "history": self.history}

    def set_extra_state(self, state):
        self.count, self.history = state["count"], state["history"]

    def forward(self, x):
        self.count += 1
        self.history.append(self.count)
        return x * self.count


def test_extra_state_comes_back_any_number_of_times():
    counts = Counts()
    moving = BufferSnapshot({"net": nn.Sequential(nn.Linear(2, 2), counts)})
    counts(torch.ones(1))
    moving.keep()
    for _ in range(2):
        counts(torch.ones(1))
        counts(torch.ones(1))
        assert (counts.count, counts.history) == (3, [1, 2, 3])
        moving.restore()
        assert (counts.count, counts.history) == (1, [1])
