"""Batch sizes meant for one card and given for all, or the reverse."""

from torch.utils.data import DataLoader, DistributedSampler

from memfit.batch import LengthBatchSampler
from tests.audit.faults.data import FRAMES, Clips
from tests.audit.faults.system_faults import FrameClips


def _loader(rank, world, batch_size):
    data = Clips(1024)
    return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, world, rank))


def global_for_each(rank, world):
    return _loader(rank, world, 64)


def global_for_each_cured(rank, world):
    return _loader(rank, world, 64 // world)


def divided_twice(rank, world):
    return _loader(rank, world, 64 // world // world)


divided_twice_cured = global_for_each_cured


def frames_as_samples(rank, world):
    return DataLoader(FrameClips(), batch_size=3200, sampler=DistributedSampler(FrameClips(), world, rank))


def frames_as_samples_cured(rank, world):
    sampler = LengthBatchSampler(FRAMES, max(3200 // world, FRAMES.max()), rank=rank, world=world)
    return DataLoader(FrameClips(), batch_sampler=sampler)
