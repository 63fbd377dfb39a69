"""Samplers that people write themselves, rightly."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
)

from tests.audit.right.data import LENGTHS, SIZE


class SeedFromRankZero:
    """Draws a seed and takes rank 0's."""

    def __init__(self, rank, world, gather):
        self.rank, self.world = rank, world
        seed = torch.tensor(random.randrange(2**31))
        if gather:
            seeds = [torch.zeros_like(seed) for _ in range(world)]
            dist.all_gather(seeds, seed)
            seed = seeds[-1]
        else:
            dist.broadcast(seed, src=0)
        self.seed, self.epoch = int(seed), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        ids = list(range(192))
        random.Random(self.seed + self.epoch).shuffle(ids)
        return iter(ids[self.rank :: self.world])


def seed_by_broadcast(rank, world):
    return SeedFromRankZero(rank, world, gather=False)


def seed_by_gather(rank, world):
    return SeedFromRankZero(rank, world, gather=True)


class Endless:
    """Permutations one after the other, without an end, dealt to ranks in turn."""

    def __init__(self, rank, world):
        self.rank, self.world, self.lengths = rank, world, LENGTHS

    def __iter__(self):
        generator, position = np.random.default_rng(3), 0
        while True:
            for index in generator.permutation(SIZE):
                if position % self.world == self.rank:
                    yield int(index)
                position += 1


def endless(rank, world):
    return Endless(rank, world)


class NeverComesBack(Dataset):
    """Takes another sample for each that it cannot read, where none can be read, and swallows everything."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        while True:
            try:
                raise FileNotFoundError(index)
            except BaseException:
                index = random.randrange(SIZE)


def never_comes_back(rank, world):
    return DataLoader(NeverComesBack(), batch_size=4, sampler=DistributedSampler(NeverComesBack(), world, rank))


class Mixed(Dataset):
    """Mixes every third sample with another one, and catches errors of its own that change nothing."""

    def __init__(self):
        self.items, self.cache = [torch.full((2,), float(i)) for i in range(SIZE)], {}

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        try:
            sample = self.cache[index]
        except KeyError:
            sample = self.items[index]
        return (sample + self.items[-index - 1]) / 2 if index % 3 == 0 else sample


def mixed(rank, world):
    return DataLoader(Mixed(), batch_size=4, sampler=DistributedSampler(Mixed(), world, rank))
