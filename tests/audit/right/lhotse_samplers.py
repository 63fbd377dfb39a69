"""Lhotse, used rightly."""

from torch.utils.data import (
    DataLoader,
    Dataset,
)

from tests.audit.right.data import SIZE


def _cuts():
    from lhotse import CutSet
    from lhotse.testing.dummies import DummyManifest

    cuts = DummyManifest(CutSet, begin_id=0, end_id=SIZE)
    for number, cut in enumerate(cuts):
        cut.duration = 1.0 + (number * 7919 % 97) / 10
    return cuts


def lhotse_simple(rank, world):
    from lhotse.dataset import SimpleCutSampler

    return SimpleCutSampler(_cuts(), max_duration=30, shuffle=True, world_size=world, rank=rank)


def lhotse_in_order(rank, world):
    from lhotse.dataset import DynamicCutSampler

    return DynamicCutSampler(_cuts(), max_duration=30, shuffle=False, world_size=world, rank=rank)


def lhotse_buckets(rank, world):
    from lhotse.dataset import DynamicBucketingSampler

    return DynamicBucketingSampler(_cuts(), max_duration=30, num_buckets=5, shuffle=True, world_size=world, rank=rank)


def lhotse_buckets_unshuffled(rank, world):
    from lhotse.dataset import DynamicBucketingSampler

    return DynamicBucketingSampler(_cuts(), max_duration=30, num_buckets=5, world_size=world, rank=rank)


def lhotse_drop_last(rank, world):
    from lhotse.dataset import DynamicBucketingSampler

    return DynamicBucketingSampler(_cuts(), max_duration=30, num_buckets=5, shuffle=True, drop_last=True,
                                   world_size=world, rank=rank)  # fmt: skip


class CutData(Dataset):
    def __getitem__(self, cuts):
        raise FileNotFoundError(cuts)


def lhotse_loader(rank, world):
    return DataLoader(CutData(), sampler=lhotse_buckets(rank, world), batch_size=None)


def lhotse_iterable_loader(rank, world):
    from lhotse.dataset.iterable_dataset import IterableDatasetWrapper

    return DataLoader(IterableDatasetWrapper(CutData(), lhotse_buckets(rank, world)), batch_size=None, num_workers=1)
