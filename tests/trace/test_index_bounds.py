"""Positions beyond their table, which torch refuses, are refused by a trace too; what may lie within is not.

python -m pytest tests/trace/test_index_bounds.py
"""

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.trace.step import Tracing, trace_job

ROWS = 12


class Looked(Job):
    """A table of 12 rows, looked up by ``positions`` of an item's numbers."""

    unit, longest = "tokens", ROWS

    def nets(self):
        return {"table": nn.Embedding(ROWS, 4)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["table"].parameters())}

    def batch(self, shape):
        return torch.randn(shape.items, shape.length)

    def positions(self, batch):
        return torch.arange(batch.shape[1], device=batch.device)

    def rows(self, table, positions):
        return table(positions)

    def loss(self, nets, batch):
        return self.rows(nets["table"], self.positions(batch)).sum() + batch.sum(), batch.numel()


class Repeated(Looked):
    def positions(self, batch):
        return super().positions(batch).int().unsqueeze(0).expand(len(batch), -1).contiguous().long()


class Shifted(Looked):
    """Begins two rows later, as OPT's positions do."""

    def positions(self, batch):
        return torch.arange(batch.shape[1] - 2, device=batch.device) + 2


class Picked(Looked):
    def rows(self, table, positions):
        return table.weight.index_select(0, positions)


class Indexed(Looked):
    def rows(self, table, positions):
        return table.weight[positions, torch.zeros_like(positions)]


class Below(Looked):
    """One row before the first, at any length but the table's: a lookup by index counts it from the end."""

    def positions(self, batch):
        return torch.arange(-1, batch.shape[1] - 1) + (batch.shape[1] == ROWS)


class Clamped(Looked):
    def positions(self, batch):
        return super().positions(batch).clamp(max=ROWS - 1)


class Cut(Looked):
    def positions(self, batch):
        return super().positions(batch)[:ROWS]


class Wrapped(Looked):
    def positions(self, batch):
        return super().positions(batch) % ROWS


class Counted(Looked):
    """The number of an item's largest value, which may lie within the table."""

    def positions(self, batch):
        return batch.argmax(1)


class Written(Looked):
    def positions(self, batch):
        return super().positions(batch).fill_(3)


def traced(job, length, device):
    return trace_job(job, Shape(items=2, length=length), Tracing(device=find_device(device)))


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
@pytest.mark.parametrize("kind", [Looked, Repeated, Shifted, Picked, Indexed])
def test_positions_beyond_their_table(kind, device):
    traced(kind(), ROWS, device)
    with pytest.raises((IndexError, RuntimeError)):
        kind().loss(kind().nets(), torch.zeros(2, ROWS + 1))
    with pytest.raises(InputError, match=r"a lookup at .*test_index_bounds.py:\d+: index 12 of a tensor that has 12"):
        traced(kind(), ROWS + 1, device)


def test_an_index_below_the_first():
    with pytest.raises(InputError, match="index -1 of a tensor that has 12 rows"):
        traced(Below(), ROWS - 2, "cpu")


@pytest.mark.parametrize("kind", [Clamped, Cut, Wrapped, Counted, Written])
def test_positions_that_may_lie_within(kind):
    kind().loss(kind().nets(), torch.zeros(2, 4 * ROWS))
    traced(kind(), 4 * ROWS, "cpu")
    traced(kind(), 4 * ROWS, "rtx4090")
