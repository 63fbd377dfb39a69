"""pytest tests/audit/test_units.py: what a finding about the global batch says."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

from memfit.audit import Meant, audit
from memfit.errors import InputError


def test_most_steps_are_named_and_not_the_mean_of_the_largest():
    batches = [64] * 19 + [16], [32] * 19 + [16]

    def target(rank, world):
        sizes = batches[rank] if world == 2 else [a + b for a, b in zip(*batches, strict=True)]
        starts = iter(range(rank * 10_000, 10_000 + rank * 10_000))
        return [[next(starts) for _ in range(size)] for size in sizes]

    (finding,) = [f for f in audit(target, (2,), meant=Meant(global_batch=64)).findings if f.code.startswith("global")]
    assert "2 ranks take 96 samples a step where 64 were meant: in most steps the ranks take 64, 32" in finding.text


class _Stream(IterableDataset):
    """Does not divide its samples among workers: each gives them all."""

    def __iter__(self):
        yield from range(100)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_samples_that_each_of_many_workers_repeats_are_no_endless_stream():
    counts = audit(lambda rank, world: DataLoader(_Stream(), batch_size=4, num_workers=64), (1,)).counts[1]
    assert counts.distinct == 100
    assert counts.batches_per_rank == [64 * 25]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_more_workers_than_are_simulated_are_refused():
    with pytest.raises(InputError, match="at most 1024 workers"):
        audit(lambda rank, world: DataLoader(_Stream(), batch_size=4, num_workers=9999), (1,))
