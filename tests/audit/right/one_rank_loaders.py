"""Right on one rank, and meant for one."""

import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.audit.right.data import SIZE, Unread


def one_rank_shuffled(rank, world):
    return DataLoader(Unread(), batch_size=4, shuffle=True)


def one_rank_in_order(rank, world):
    return SequentialSampler(range(SIZE))


def one_rank_subset(rank, world):
    return DataLoader(Unread(), batch_size=4, sampler=SubsetRandomSampler(list(range(0, SIZE, 3))))


def one_rank_weighted(rank, world):
    return DataLoader(Unread(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(SIZE), SIZE))


def one_rank_some(rank, world):
    return DataLoader(Unread(), batch_size=4, sampler=RandomSampler(Unread(), num_samples=50))


def one_rank_weighted_without_replacement(rank, world):
    sampler = WeightedRandomSampler(torch.ones(SIZE), 50, replacement=False)
    return DataLoader(Unread(), batch_size=4, sampler=sampler)
