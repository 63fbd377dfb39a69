"""Not sharded, sharded with a constant rank, shuffled apart, unequal."""

import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from tests.audit.faults.data import SIZE, Clips


def wrapped_by_accelerate(rank, world):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(wrapped_by_accelerate_cured(rank, world))


def wrapped_by_accelerate_cured(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=DistributedSampler(Clips(), world, rank))


def unsharded(rank, world):
    return DataLoader(Clips(), batch_size=4, shuffle=True)


def unsharded_cured(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=DistributedSampler(Clips(), world, rank))


def rank_zero_everywhere(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=DistributedSampler(Clips(), world, 0))


rank_zero_everywhere_cured = unsharded_cured


class OwnShuffle(Sampler):
    def __init__(self, rank, world, seed=None):
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0
        self.dataset = range(SIZE)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        ids = list(range(SIZE))
        random.Random(None if self.seed is None else self.seed + self.epoch).shuffle(ids)
        return iter(ids[self.rank :: self.world])


def shuffled_apart(rank, world):
    return OwnShuffle(rank, world)


def shuffled_apart_cured(rank, world):
    return OwnShuffle(rank, world, seed=3)


class Unsplit(IterableDataset):
    """Every worker gives everything."""

    def __init__(self, rank, world, split):
        self.rank, self.world, self.split, self.epoch = rank, world, split, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        ids = np.random.default_rng(self.epoch).permutation(SIZE)[self.rank :: self.world]
        yield from map(int, ids[info.id :: info.num_workers] if self.split else ids)


def workers_repeat(rank, world):
    return DataLoader(Unsplit(rank, world, split=False), batch_size=4, num_workers=2)


def workers_repeat_cured(rank, world):
    return DataLoader(Unsplit(rank, world, split=True), batch_size=4, num_workers=2)


class Uneven(Sampler):
    def __init__(self, rank, world, even):
        self.rank, self.world, self.even, self.epoch = rank, world, even, 0
        self.data_source = Clips(601)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        ids = np.random.default_rng(self.epoch).permutation(601)
        if self.even:
            ids = np.append(ids, ids[: -601 % self.world])
        return iter(ids[self.rank :: self.world].tolist())


def uneven(rank, world):
    return Uneven(rank, world, even=False)


def uneven_cured(rank, world):
    return Uneven(rank, world, even=True)


class SameOrder(DistributedSampler):
    """Its set_epoch changes nothing."""

    def set_epoch(self, epoch):
        pass


def same_order(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=SameOrder(Clips(), world, rank))


same_order_cured = unsharded_cured


class SeededStream(IterableDataset):
    """Shuffled by a seed that knows nothing of the epoch."""

    def __init__(self, rank, world, moves):
        self.rank, self.world, self.moves, self.epoch = rank, world, moves, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        ids = np.random.default_rng(self.epoch if self.moves else 0).permutation(96)
        yield from ({"name": f"clip{number}"} for number in ids[self.rank :: self.world])


def same_stream(rank, world):
    return DataLoader(SeededStream(rank, world, moves=False), batch_size=4)


def same_stream_cured(rank, world):
    return DataLoader(SeededStream(rank, world, moves=True), batch_size=4)


def shard_without_epoch(rank, world):
    """The epoch reaches a bare shard of batches, and not the sampler that it wraps: no trainer goes further."""
    from accelerate.data_loader import BatchSamplerShard

    inner = BatchSampler(DistributedSampler(Clips(), num_replicas=1, rank=0), batch_size=4, drop_last=False)
    return BatchSamplerShard(inner, world, rank)


def shard_without_epoch_cured(rank, world):
    from accelerate.data_loader import BatchSamplerShard

    class Shard(BatchSamplerShard):
        def set_epoch(self, epoch):
            self.batch_sampler.sampler.set_epoch(epoch)

    inner = BatchSampler(DistributedSampler(Clips(), num_replicas=1, rank=0), batch_size=4, drop_last=False)
    return Shard(inner, world, rank)


def _weighted(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return WeightedRandomSampler(torch.linspace(1, 9, SIZE), count, generator=generator)


def weighted_alike(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=_weighted(SIZE, seed=7))


def weighted_alike_cured(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=_weighted(SIZE, seed=7 + rank))


def weighted_shares_alike(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=_weighted(SIZE // world, seed=7))


def weighted_shares_alike_cured(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=_weighted(SIZE // world, seed=7 + rank))
