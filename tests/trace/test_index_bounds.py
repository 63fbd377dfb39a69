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


class OfOnes(Looked):
    """As OPT's positions, whose mask may be of floating point numbers."""

    dtype = torch.float32

    def positions(self, batch):
        mask = torch.ones(batch.shape, dtype=self.dtype, device=batch.device)
        positions = (torch.cumsum(mask, dim=1) * mask - 1).long()
        return positions[:, 0:] - 2 + 2


class OfIntegerOnes(OfOnes):
    dtype = torch.long


class OfCastOnes(Looked):
    def positions(self, batch):
        return batch.new_ones(batch.shape).bool().int()[:, : batch.shape[1]].cumsum(-1) - 1


class OfPadding(Looked):
    """As RoBERTa's positions: padding has the number 1, and the first element 2."""

    def batch(self, shape):
        return torch.randint(0, 100, (shape.items, shape.length))

    def positions(self, batch):
        mask = batch.ne(1).int()
        counted = (torch.cumsum(mask, dim=1).type_as(mask) + 0) * mask
        return (counted.long() + 1)[:, 0:] - 2


class OfStoredPadding(OfPadding):
    """Of items that are no random numbers, but read."""

    def batch(self, shape):
        return torch.empty(shape.items, shape.length + 1, dtype=torch.long)[:, 1:]

    def positions(self, batch):
        return ((batch != 0).long().cumsum(1) - 1).clone()


class Joined(Looked):
    def positions(self, batch):
        counted = super().positions(batch)
        return torch.cat((counted[:2], counted, counted[:0]))


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


class Offset(Looked):
    """A number with a factor."""

    def positions(self, batch):
        return torch.add(torch.arange(4, device=batch.device), batch.shape[1] - 4, alpha=0)


class OfSeparators(OfPadding):
    """Segments that end with 100, of which there is none."""

    def positions(self, batch):
        return (batch == 100).cumsum(1)


class OfChanges(OfPadding):
    """Segments begin where a number changes."""

    def batch(self, shape):
        return torch.randint(0, 100, (shape.items, 1)).repeat(1, shape.length)

    def positions(self, batch):
        return (batch.diff(dim=1) != 0).cumsum(1)


class OfPadded(OfPadding):
    """Padded to as many as the table has, as Longformer pads to a multiple of its window."""

    def pad(self, batch):
        return nn.functional.pad(batch, (0, ROWS), value=1)

    def positions(self, batch):
        return self.pad(batch[:, : ROWS - 2]).ne(1).long().cumsum(1)


class OfJoinedPadding(OfPadded):
    def pad(self, batch):
        return torch.cat((batch, batch.new_full((len(batch), ROWS), 1)), 1)


class OfWrittenPadding(OfPadded):
    def pad(self, batch):
        padded = batch.repeat(1, 3)
        padded[:, ROWS - 3 :] = 1
        return padded.int()


class OfFlags(OfPadding):
    def batch(self, shape):
        return torch.randint(0, 2, (shape.items, shape.length)) * 0

    def positions(self, batch):
        return (batch != 0).cumsum(1)


class OfWrittenOnes(Looked):
    def positions(self, batch):
        mask = torch.ones(batch.shape, dtype=torch.long, device=batch.device)
        mask[:, 3:] = 0
        return mask.cumsum(1)


class InInference(Looked):
    """Writes to tensors of inference mode are not counted."""

    def loss(self, nets, batch):
        with torch.inference_mode():
            positions = self.positions(batch)
            positions.clamp_(max=3)
            nets["table"](positions)
        return nets["table"].weight.sum(), batch.numel()


LONGER = [
    Looked, Repeated, Shifted, Picked, Indexed, OfOnes, OfIntegerOnes, OfCastOnes, OfPadding, OfStoredPadding,
    Joined,
]  # fmt: skip
WITHIN = [
    Clamped, Cut, Wrapped, Counted, Written, Offset, OfSeparators, OfChanges, OfPadded, OfJoinedPadding,
    OfWrittenPadding, OfFlags, OfWrittenOnes, InInference,
]  # fmt: skip


def traced(job, length, device):
    return trace_job(job, Shape(items=2, length=length), Tracing(device=find_device(device)))


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
@pytest.mark.parametrize("kind", LONGER)
def test_positions_beyond_their_table(kind, device):
    traced(kind(), ROWS, device)
    with pytest.raises((IndexError, RuntimeError)):
        kind().loss(kind().nets(), torch.zeros(2, ROWS + 1, dtype=kind().batch(Shape(items=1, length=1)).dtype) + 7)
    with pytest.raises(InputError, match=r"a lookup at .*test_index_bounds.py:\d+: index 12 of a tensor that has 12"):
        traced(kind(), ROWS + 1, device)


def test_sums_that_floating_point_numbers_do_not_hold():
    with pytest.raises(InputError, match=r"index \d+ of a tensor that has 12"):
        traced(OfOnes(), 30_000_000, "rtx4090")


def test_an_index_below_the_first():
    with pytest.raises(InputError, match="index -1 of a tensor that has 12 rows"):
        traced(Below(), ROWS - 2, "cpu")


@pytest.mark.parametrize("kind", WITHIN)
def test_positions_that_may_lie_within(kind):
    kind().loss(kind().nets(), torch.zeros_like(kind().batch(Shape(items=2, length=4 * ROWS))))
    traced(kind(), 4 * ROWS, "cpu")
    traced(kind(), 4 * ROWS, "rtx4090")
