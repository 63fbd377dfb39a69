"""Steps that come late, never, or too often."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.audit.faults.system_faults import RankBuckets


def s1_steps(rank, world, observe):
    sampler = RankBuckets(240, 8, rank, world)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ids = list(sampler)
        for number in range(len(ids) // 8):
            observe.batch(ids[number * 8 : number * 8 + 8])
            if number > 0 and number % 4 == 0:
                observe.step()


def s1_steps_cured(rank, world, observe):
    sampler = RankBuckets(240, 8, rank, world)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ids = list(sampler)
        for number in range(len(ids) // 8):
            observe.batch(ids[number * 8 : number * 8 + 8])
            if (number + 1) % 4 == 0 or number + 1 == len(ids) // 8:
                observe.step()


def s1_short_epoch(rank, world, observe):
    for epoch in range(2):
        sampler = RankBuckets(96, 1, rank, world)
        sampler.set_epoch(epoch)
        ids = list(sampler)
        for number in range(4):
            observe.batch(ids[number::4])
            if number > 0 and number % 4 == 0:
                observe.step()


def s1_short_epoch_cured(rank, world, observe):
    for epoch in range(2):
        sampler = RankBuckets(96, 1, rank, world)
        sampler.set_epoch(epoch)
        ids = list(sampler)
        for number in range(4):
            observe.batch(ids[number::4])
            if (number + 1) % 4 == 0:
                observe.step()


def _steps(rank, world, observe, micro_batch, accumulation):
    data = TensorDataset(torch.arange(1024))
    sampler = DistributedSampler(data, world, rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (ids,) in enumerate(DataLoader(data, batch_size=micro_batch, sampler=sampler)):
            observe.batch(ids)
            if (number + 1) % accumulation == 0:
                observe.step()


def musetalk_steps(rank, world, observe):
    """Global 64 = 8 x world x accumulation was meant; accumulate() is never entered."""
    _steps(rank, world, observe, 8, 1)


def musetalk_steps_cured(rank, world, observe):
    _steps(rank, world, observe, 8, 64 // 8 // world)
