"""Samples in nested batches, in batches of none, and in streams without an end.

pytest tests/audit/test_samples_known.py
"""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from memfit.audit import audit
from memfit.audit.ids import batch_of
from memfit.errors import InputError


def nested(number: int) -> dict:
    return {"inputs": {"tokens": torch.full((3,), number), "mask": torch.ones(3)}, "target": number}


def test_rows_of_batches_whose_fields_lie_in_others_are_samples():
    data = [nested(number) for number in range(64)]

    def loader(rank, world):
        return list(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank)))

    counts = audit(loader, (2,)).counts[2]
    assert (counts.distinct, counts.duplicates, counts.missing) == (64, 0, 0)
    assert counts.samples_per_rank == [32, 32]


def test_a_batch_of_nested_fields_alone_has_their_rows():
    rows = batch_of({"inputs": {"tokens": torch.arange(6).reshape(3, 2)}}).ids
    assert len(set(rows)) == 3


def reporting_nothing(rank, world, observe):
    for _ in range(4):
        observe.batch([])
        observe.step()


@pytest.mark.parametrize(
    ("target", "batches"), [(lambda rank, world: [{"loss": 0.5}] * 5, 5), (reporting_nothing, 4)]
)  # fmt: skip
def test_batches_that_hold_no_sample_are_refused_and_not_called_faultless(target, batches):
    with pytest.raises(InputError, match=f"the {batches} batches of one rank: none of them holds a sample"):
        audit(target, (1, 2))


class Endless:
    def __iter__(self):
        return itertools.count()


@pytest.mark.parametrize("target", [lambda rank, world: itertools.count(), lambda rank, world: Endless()])
def test_a_stream_of_new_samples_without_an_end_or_length_is_refused(target):
    with pytest.raises(InputError, match="none of which came twice, it had not ended"):
        audit(target, (1, 2))


def test_one_that_says_its_length_is_cut_there():
    class Sized(Endless):
        def __len__(self):
            return 50

    assert audit(lambda rank, world: Sized(), (1,)).counts[1].samples_per_rank == [50]
