"""Targets with one fault each, as the training projects have them, and their cures (``…_cured``)."""

import itertools
import math
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

from memfit.batch import LengthBatchSampler

SIZE = 600
FRAMES = np.random.default_rng(0).integers(28, 2813, SIZE)


class Clips(Dataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise FileNotFoundError(index)


# GPT-SoVITS s1: a bucket sampler that shards by rank, wrapped by Lightning's sampler, which shards again.


class RankBuckets(Sampler):
    def __init__(self, size, batch_size, rank, world):
        self.size, self.rank, self.world, self.epoch, self.shuffle = size, rank, world, 0, True
        self.num_samples = math.ceil(size / world)
        self.bucket = 16 * batch_size

    def __len__(self):
        return self.num_samples

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator, ids = random.Random(self.epoch), list(range(self.size))
        generator.shuffle(ids)
        buckets = [sorted(ids[at : at + self.bucket]) for at in range(0, self.size, self.bucket)]
        generator.shuffle(buckets)
        ids = [index for bucket in buckets for index in bucket]
        ids += ids[: self.num_samples * self.world - self.size]
        return iter(ids[self.rank :: self.world])


def sovits_s1(rank, world):
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import RunningStage

    loader = sovits_s1_cured(rank, world)
    trainer = Trainer(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    return trainer._data_connector._prepare_dataloader(loader, shuffle=False, mode=RunningStage.TRAINING)


def sovits_s1_cured(rank, world):
    return DataLoader(Clips(3600), batch_size=8, sampler=RankBuckets(3600, 8, rank, world), num_workers=4)


def wrapped_by_accelerate(rank, world):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(wrapped_by_accelerate_cured(rank, world))


def wrapped_by_accelerate_cured(rank, world):
    return DataLoader(Clips(), batch_size=4, sampler=DistributedSampler(Clips(), world, rank))


# F5-TTS: sorted, packed by the sum of frames, too long clips dropped, and an epoch that stops at Accelerate's wrapper.


class FramePacks(Sampler):
    def __init__(self, source, frames, threshold, keep=False, most=64):
        self.data_source, self.epoch, self.drop_last = source, 0, False
        self.batches, batch, filled = [], [], 0
        for index in np.argsort(frames):
            if frames[index] > threshold and not keep:
                continue
            if filled + frames[index] > threshold or len(batch) == most:
                self.batches.append(batch)
                batch, filled = [], 0
            batch.append(int(index))
            filled += frames[index]
        self.batches.append(batch)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(7 + self.epoch)
        return iter([self.batches[i] for i in torch.randperm(len(self.batches), generator=generator)])

    def __len__(self):
        return len(self.batches)


class FrameClips(Clips):
    def get_frame_len(self, index):
        return FRAMES[index]


def f5_epoch(rank, world):
    from accelerate import Accelerator

    loader = DataLoader(FrameClips(), batch_sampler=FramePacks(FrameClips(), FRAMES, 3200))
    return Accelerator(cpu=True).prepare(loader)


def f5_epoch_cured(rank, world):
    from accelerate import Accelerator

    class Passed(FramePacks):
        @property
        def sampler(self):
            return self

    loader = DataLoader(FrameClips(), batch_sampler=Passed(FrameClips(), FRAMES, 3200))
    return Accelerator(cpu=True).prepare(loader)


def f5_too_long(rank, world):
    return DataLoader(FrameClips(), batch_sampler=FramePacks(FrameClips(), FRAMES, 2700)) if world == 1 else None


def f5_too_long_cured(rank, world):
    return DataLoader(FrameClips(), batch_sampler=FramePacks(FrameClips(), FRAMES, 2812))


# GPT-SoVITS s2: clips repeated until each bucket is a multiple of world x batch; lengths outside its buckets dropped.


class PaddedBuckets(DistributedSampler):
    def __init__(self, size, lengths, batch_size, bounds, rank, world, pad=True):
        super().__init__(range(size), num_replicas=world, rank=rank, shuffle=True)
        self.lengths, self.batch_size, self.pad = lengths, batch_size, pad
        edges = itertools.pairwise(bounds)
        self.buckets = [np.flatnonzero((lengths > low) & (lengths <= high)) for low, high in edges]

    def __iter__(self):
        generator, batches = np.random.default_rng(self.epoch), []
        whole = self.num_replicas * self.batch_size
        for bucket in self.buckets:
            ids = generator.permutation(bucket)
            if self.pad:
                ids = np.resize(ids, -(-len(ids) // whole) * whole)
            own = ids[self.rank :: self.num_replicas]
            batches += [own[at : at + self.batch_size].tolist() for at in range(0, len(own), self.batch_size)]
        generator.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return sum(-(-len(bucket) // (self.num_replicas * self.batch_size)) for bucket in self.buckets)


def sovits_s2_repeats(rank, world):
    bounds = [0, 300, 600, 900, 1200, 1900, 2812]
    return DataLoader(Clips(), batch_sampler=PaddedBuckets(SIZE, FRAMES, 8, bounds, rank, world))


def sovits_s2_repeats_cured(rank, world):
    return DataLoader(Clips(), batch_sampler=PaddedBuckets(SIZE, FRAMES, 8, [0, 2812], rank, world))


def sovits_s2_drops(rank, world):
    return PaddedBuckets(SIZE, FRAMES, 8, [32, 1900], rank, world)


def sovits_s2_drops_cured(rank, world):
    return PaddedBuckets(SIZE, FRAMES, 8, [27, 2812], rank, world)


# Not sharded, sharded with a constant rank, shuffled apart, unequal.


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


# Steps.


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


# The size of a batch.


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


# A sample that cannot be read is replaced by another one.


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
