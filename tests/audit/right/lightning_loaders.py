"""Lightning, used rightly."""

import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
)

from tests.audit.right.data import SIZE, Unread


def lightning_prepared(rank, world):
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import RunningStage

    trainer = Trainer(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    loader = DataLoader(Unread(), batch_size=4, shuffle=True)
    return trainer._data_connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING)


def lightning_sampler_wrapper(rank, world):
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    class EverySecondSeed(RandomSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(2 * self.epoch)).tolist())

    sampler = DistributedSamplerWrapper(EverySecondSeed(Unread()), num_replicas=world, rank=rank)
    return DataLoader(Unread(), batch_size=4, sampler=sampler)


def lightning_fabric(rank, world):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric._launched = True
    return fabric.setup_dataloaders(DataLoader(Unread(), batch_size=4, shuffle=True))
