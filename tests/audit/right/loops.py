"""Loops that are right."""

import math

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)

from memfit.batch import LengthBatchSampler
from tests.audit.right.data import LENGTHS, SIZE


def loop_over_a_loader(rank, world, observe):
    data = TensorDataset(torch.arange(SIZE))
    sampler = DistributedSampler(data, world, rank)
    validation = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (ids,) in enumerate(loader):
            observe.batch(ids)
            if (number + 1) % 4 == 0 or number + 1 == len(loader):
                observe.step()
            if number == 5:
                list(validation)


def loop_of_two_optimizers(rank, world, observe):
    data = TensorDataset(torch.arange(SIZE))
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (ids,) in enumerate(loader):
            observe.batch(ids)
            if (number + 1) % 4 == 0 or number + 1 == len(loader):
                observe.step()
                observe.step()


def loop_over_a_sampler(rank, world, observe):
    sampler = LengthBatchSampler(LENGTHS, 2000, rank=rank, world=world)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids in sampler:
            observe.batch(ids, lengths=LENGTHS[ids])
            observe.step()


def loop_that_goes_on_over_epochs(rank, world, observe):
    sampler, number = LengthBatchSampler(LENGTHS, 2000, rank=rank, world=world), 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids in sampler:
            observe.batch(ids)
            number += 1
            if number % 4 == 0:
                observe.step()


def loop_of_dicts(rank, world, observe):
    ids = np.arange(math.ceil(SIZE / world) * world) % SIZE
    for epoch in range(2):
        observe.epoch(epoch)
        own = np.random.default_rng(epoch).permutation(ids)[rank::world]
        for start in range(0, len(own), 4):
            observe.batch({"id": [f"clip{i}" for i in own[start : start + 4]], "x": torch.ones(1)})
            observe.step()


def loop_of_ddp(rank, world, observe):
    data = TensorDataset(torch.arange(SIZE))
    sampler = DistributedSampler(data, world, rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in DataLoader(data, batch_size=4, sampler=sampler):
            model(ids[:, None].float()).mean().backward()
            observe.batch(ids)
            optimizer.step()
            observe.step()


def loop_of_accelerate(rank, world, observe):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    data = TensorDataset(torch.arange(SIZE))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    for _ in range(2):
        for (ids,) in loader:
            with accelerator.accumulate(model):
                observe.batch(ids)
                accelerator.backward(model(ids[:, None].float()).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                observe.step()


def loop_of_lightning(rank, world, observe):
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch, number):
            observe.batch(batch[0])
            return self.net(batch[0][:, None].float()).mean()

        def on_before_optimizer_step(self, optimizer):
            observe.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    data = TensorDataset(torch.arange(SIZE))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=3, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Module(), loader)
