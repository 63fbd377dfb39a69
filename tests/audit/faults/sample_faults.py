"""A sample that cannot be read is replaced by another one."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset, default_collate

from tests.audit.faults.data import SIZE, Clips


class Replacing(Dataset):
    def __init__(self, replace):
        self.replace = replace

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        while self.replace and index % 10 == 3:
            index = random.randrange(SIZE)
        return {"id": index, "x": torch.zeros(2)}


def replacing(rank, world):
    data = Replacing(replace=True)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))


def replacing_cured(rank, world):
    data = Replacing(replace=False)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))


def replacing_loop(rank, world, observe):
    loader = replacing(rank, world)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            observe.batch(batch)
            observe.step()


def replacing_loop_cured(rank, world, observe):
    loader = replacing_cured(rank, world)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            observe.batch(batch["id"])
            observe.step()


class WithReplacement(Sampler):
    def __init__(self, rank, world, once):
        self.rank, self.world, self.once, self.epoch, self.data_source = rank, world, once, 0, Clips()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = np.random.default_rng(self.epoch)
        ids = generator.permutation(SIZE) if self.once else generator.integers(SIZE, size=SIZE)
        return iter(ids[self.rank :: self.world].tolist())


def with_replacement(rank, world):
    return WithReplacement(rank, world, once=False)


def with_replacement_cured(rank, world):
    return WithReplacement(rank, world, once=True)


class Videos(Dataset):
    """LatentSync's way with what it cannot read: another one, at random. Its samples carry no id."""

    def __init__(self, readable):
        self.paths = [f"{number}.mp4" for number in range(SIZE)]
        self.readable = readable

    def __len__(self):
        return len(self.paths)

    def read(self, path):
        if not self.readable and int(path.split(".")[0]) % 50 == 7:
            raise OSError(path)
        return torch.zeros(2)

    def __getitem__(self, index):
        while True:
            try:
                return {"pixels": self.read(self.paths[index])}
            except OSError:
                index = random.randint(0, len(self) - 1)


def videos(rank, world):
    data = Videos(readable=False)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))


def videos_cured(rank, world):
    data = Videos(readable=True)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))


class Broken(Dataset):
    """Some samples cannot be read: None comes in their place, or the next sample."""

    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index % 50 != 7 or not self.broken:
            return {"x": torch.full((2,), float(index))}
        return None if self.broken == "none" else self[index + 1]


def _leave_out(samples):
    return default_collate([sample for sample in samples if sample is not None])


def none_left_out(rank, world):
    data = Broken("none")
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank), collate_fn=_leave_out)


def none_left_out_cured(rank, world):
    data = Subset(Broken("none"), [index for index in range(SIZE) if index % 50 != 7])
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank), collate_fn=_leave_out)


def handed_on(rank, world):
    data = Broken("next")
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))


def handed_on_cured(rank, world):
    data = Broken(False)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))
