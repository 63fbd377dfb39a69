"""Samplers as GPT-SoVITS and F5-TTS have them: wrapped twice, an epoch never passed on, clips dropped and repeated."""

import itertools
import math
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from tests.audit.faults.data import FRAMES, SIZE, Clips


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


class PaddedBuckets(DistributedSampler):
    def __init__(self, size, lengths, batch_size, bounds, rank, world, pad=True):
        super().__init__(range(size), num_replicas=world, rank=rank, shuffle=True)
        self.lengths, self.batch_size, self.pad = lengths, batch_size, pad
        edges = itertools.pairwise(bounds)
        self.buckets = [np.flatnonzero((lengths > low) & (lengths <= high)) for low, high in edges]

    def __iter__(self):
        generator, batches = np.random.default_rng(self.epoch), []
        complete = self.num_replicas * self.batch_size
        for bucket in self.buckets:
            ids = generator.permutation(bucket)
            if self.pad:
                ids = np.resize(ids, -(-len(ids) // complete) * complete)
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
