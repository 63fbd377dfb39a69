"""memfit's own sampler."""

from torch.utils.data import (
    DataLoader,
)

from memfit.batch import LengthBatchSampler, batch_loader
from tests.audit.right.data import LENGTHS, Unread


def own(rank, world):
    return DataLoader(Unread(), batch_sampler=LengthBatchSampler(LENGTHS, 2000, rank=rank, world=world))


def own_sampler_alone(rank, world):
    return LengthBatchSampler(LENGTHS, 2000, rank=rank, world=world, noise=0.03)


def own_that_drops_by_name(rank, world):
    return LengthBatchSampler(LENGTHS, 380, rank=rank, world=world, too_long="drop", remainder="drop")


def own_for_lightning(rank, world):
    return batch_loader(Unread(), LengthBatchSampler(LENGTHS, 2000, rank=rank, world=world))


def own_for_accelerate(rank, world):
    from accelerate import Accelerator

    sampler = LengthBatchSampler(LENGTHS, 2000, world=world, every_rank=True)
    return Accelerator(cpu=True).prepare(DataLoader(Unread(), batch_sampler=sampler))
