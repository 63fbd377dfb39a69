"""Loaders of Transformers, DeepSpeed and Detectron's kind, used rightly."""

import itertools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
)

from tests.audit.right.data import LENGTHS, SIZE, Unread


def transformers_length_grouped(rank, world):
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    sampler = DistributedLengthGroupedSampler(4, lengths=LENGTHS.tolist(), num_replicas=world, rank=rank)
    return DataLoader(Unread(), batch_size=4, sampler=sampler)


def deepspeed_loader(rank, world):
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader

    timer = SimpleNamespace(start=lambda: None, stop=lambda: None)
    return DeepSpeedDataLoader(Unread(), 4, False, rank, timer, data_parallel_world_size=world, data_parallel_rank=rank)


class Detectron(Sampler):
    """Endless, and knows its size by another name than most."""

    def __init__(self, size, rank, world):
        self._size, self._rank, self._world = size, rank, world

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)

        def permutations():
            while True:
                yield from torch.randperm(self._size, generator=generator).tolist()

        return itertools.islice(permutations(), self._rank, None, self._world)


def endless_of_unknown_size(rank, world):
    return Detectron(SIZE, rank, world)


def transformers_trainer(rank, world):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir="unused", use_cpu=True, per_device_train_batch_size=4, report_to=[])
    return Trainer(torch.nn.Linear(2, 2), arguments, train_dataset=Unread()).get_train_dataloader()


def asks_for_its_card_before_its_rank(rank, world):
    """As GPT-SoVITS' bucket sampler: the rank counts only where there is a card."""
    has_card = torch.cuda.is_available()
    if has_card:
        torch.cuda.set_device(rank)
    replicas, number = (dist.get_world_size(), dist.get_rank()) if has_card else (1, 0)
    return DataLoader(Unread(), 4, sampler=DistributedSampler(Unread(), replicas, number))
