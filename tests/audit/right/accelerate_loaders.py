"""Accelerate, used rightly."""

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)

from tests.audit.right.data import Unread


def accelerate_prepared(rank, world):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(DataLoader(Unread(), batch_size=4, shuffle=True, num_workers=2))


def accelerate_not_told_of_the_cpu(rank, world):
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.num_processes == world
    return accelerator.prepare(DataLoader(Unread(), batch_size=4, shuffle=True))


def accelerate_seedable(rank, world):
    from accelerate import Accelerator, DataLoaderConfiguration

    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(Unread(), 4, shuffle=True))


def accelerate_split_batches(rank, world):
    from accelerate import Accelerator, DataLoaderConfiguration

    configuration = DataLoaderConfiguration(split_batches=True)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(Unread(), 24, shuffle=True))


def accelerate_iterable(rank, world):
    from accelerate import Accelerator, DataLoaderConfiguration

    class Numbers(IterableDataset):
        def __iter__(self):
            yield from range(192)

    configuration = DataLoaderConfiguration(dispatch_batches=False)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(Numbers(), 4))


def accelerate_dispatches(rank, world):
    from accelerate import Accelerator

    class Dicts(IterableDataset):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for index in np.random.default_rng(self.epoch).permutation(192).tolist():
                yield {"id": index, "x": torch.ones(2)}

    return Accelerator(cpu=True).prepare(DataLoader(Dicts(), batch_size=4))


def accelerate_dispatches_indices(rank, world):
    from accelerate import Accelerator, DataLoaderConfiguration

    configuration = DataLoaderConfiguration(dispatch_batches=True)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(Unread(), 4, shuffle=True))


def accelerate_stateful(rank, world):
    from accelerate import Accelerator, DataLoaderConfiguration

    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(Unread(), 4, shuffle=True))
