"""When an epoch meets its largest batch, and the warning before that step.

pytest tests/monitoring/test_epoch_lengths.py
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import memfit
from memfit.errors import InputError

LENGTHS = [5, 6, 50, 7, 8, 9, 4]


def test_the_largest_step_by_padded_units() -> None:
    epoch = memfit.epoch_lengths(BatchSampler(SequentialSampler(LENGTHS), 2, drop_last=False), LENGTHS)
    assert epoch.units == (12, 100, 18, 4)
    assert epoch.largest_step == 1
    grouped = memfit.epoch_lengths([[0], [1], [2], [3]], LENGTHS, accumulate=2)
    assert grouped.units == (6, 50)


def test_a_distributed_sampler_has_an_order_of_its_own() -> None:
    sampler = BatchSampler(DistributedSampler(LENGTHS, num_replicas=2, rank=0, seed=3), 2, drop_last=False)
    first = memfit.epoch_lengths(sampler, LENGTHS)
    assert first == memfit.epoch_lengths(sampler, LENGTHS)


def test_the_watch_warns_before_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    epoch = memfit.epoch_lengths([[index] for index in range(7)], LENGTHS)
    with memfit.watch(optimizer, out=None, epoch=epoch) as monitor:
        optimizer.step()
        assert monitor.warnings == []
        optimizer.step()
        assert monitor.warnings == [
            "the next step (2) is the largest of the epoch: 50 padded units, where no step before had more than 6"
        ]
        for _ in range(5):
            optimizer.step()
        assert len(monitor.warnings) == 1
        monitor.new_epoch(epoch)
        optimizer.step()
        optimizer.step()
        assert len(monitor.warnings) == 2
    assert "the next step (2) is the largest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("batches", "accumulate"),
    [(BatchSampler(RandomSampler(LENGTHS), 2, drop_last=False), 1), ([], 1), ([[99]], 1), ([3], 1), ([[0]], 0)],
)
def test_what_is_not_known_is_one_line(batches: Any, accumulate: int) -> None:
    with pytest.raises(InputError):
        memfit.epoch_lengths(batches, LENGTHS, accumulate)
