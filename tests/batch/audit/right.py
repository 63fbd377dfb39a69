"""Targets that are right: the audit must find nothing in them."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from memfit.batch import LengthBatchSampler, batch_loader

SIZE = 203
LENGTHS = np.random.default_rng(0).integers(20, 400, SIZE)


class Unread(Dataset):
    """Its samples cannot be read here, as on a machine without the data."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        raise FileNotFoundError(index)


def torch_shuffled(rank, world):
    return DataLoader(Unread(), batch_size=4, num_workers=2, persistent_workers=True,
                      sampler=DistributedSampler(Unread(), world, rank))  # fmt: skip


def torch_in_order(rank, world):
    return DataLoader(Unread(), batch_size=4, sampler=DistributedSampler(Unread(), world, rank, shuffle=False))


def torch_drop_last(rank, world):
    return DataLoader(Unread(), 4, sampler=DistributedSampler(Unread(), world, rank, drop_last=True), drop_last=True)


def torch_drop_last_of_loader(rank, world):
    return DataLoader(Unread(), 16, sampler=DistributedSampler(Unread(), world, rank), drop_last=True)


def torch_sampler_alone(rank, world):
    return DistributedSampler(range(SIZE), world, rank)


def torch_asks_for_its_rank(rank, world):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    return DataLoader(Unread(), batch_size=4, sampler=DistributedSampler(Unread()))


def torch_starts_the_group_itself(rank, world):
    dist.init_process_group("gloo")
    return DataLoader(Unread(), batch_size=4, sampler=DistributedSampler(Unread()))


def torch_batch_sampler(rank, world):
    return DataLoader(Unread(), batch_sampler=BatchSampler(DistributedSampler(Unread(), world, rank), 4, False))


def torch_tensors(rank, world):
    data = TensorDataset(torch.randn(SIZE, 3), torch.randint(10, (SIZE,)))
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank))


def stateful(rank, world):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Unread(), num_replicas=world, rank=rank)
    return StatefulDataLoader(Unread(), batch_size=4, sampler=sampler, num_workers=2)


class Sharded(IterableDataset):
    """Shards by rank and worker; ``make`` makes a sample of its number."""

    def __init__(self, rank, world, make):
        self.rank, self.world, self.make, self.epoch = rank, world, make, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        ids = np.random.default_rng(self.epoch).permutation(192)
        for index in ids[self.rank * workers + worker :: self.world * workers]:
            yield self.make(int(index))


class ShardedLoader:
    def __init__(self, dataset, **options):
        self.dataset = dataset
        self.loader = DataLoader(dataset, **options)

    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch)

    def __iter__(self):
        return iter(self.loader)


def iterable_of_dicts(rank, world):
    return ShardedLoader(Sharded(rank, world, lambda i: {"x": torch.ones(2), "id": f"clip{i}"}), batch_size=4)


def iterable_of_tensors_with_workers(rank, world):
    return ShardedLoader(Sharded(rank, world, lambda i: (torch.full((2,), i), i % 3)), batch_size=4, num_workers=2)


def own_loader_of_collated_dicts(rank, world):
    def make(index):
        return {"id": torch.tensor([2 * index, 2 * index + 1]), "x": torch.ones(2)}

    return ShardedLoader(Sharded(rank, world, make), batch_size=None)


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


def _cuts():
    from lhotse import CutSet
    from lhotse.testing.dummies import DummyManifest

    cuts = DummyManifest(CutSet, begin_id=0, end_id=SIZE)
    for number, cut in enumerate(cuts):
        cut.duration = 1.0 + (number * 7919 % 97) / 10
    return cuts


def lhotse_simple(rank, world):
    from lhotse.dataset import SimpleCutSampler

    return SimpleCutSampler(_cuts(), max_duration=30, shuffle=True, world_size=world, rank=rank)


def lhotse_in_order(rank, world):
    from lhotse.dataset import DynamicCutSampler

    return DynamicCutSampler(_cuts(), max_duration=30, shuffle=False, world_size=world, rank=rank)


def lhotse_buckets(rank, world):
    from lhotse.dataset import DynamicBucketingSampler

    return DynamicBucketingSampler(_cuts(), max_duration=30, num_buckets=5, shuffle=True, world_size=world, rank=rank)


def lhotse_buckets_unshuffled(rank, world):
    from lhotse.dataset import DynamicBucketingSampler

    return DynamicBucketingSampler(_cuts(), max_duration=30, num_buckets=5, world_size=world, rank=rank)


def lhotse_drop_last(rank, world):
    from lhotse.dataset import DynamicBucketingSampler

    return DynamicBucketingSampler(_cuts(), max_duration=30, num_buckets=5, shuffle=True, drop_last=True,
                                   world_size=world, rank=rank)  # fmt: skip


class CutData(Dataset):
    def __getitem__(self, cuts):
        raise FileNotFoundError(cuts)


def lhotse_loader(rank, world):
    return DataLoader(CutData(), sampler=lhotse_buckets(rank, world), batch_size=None)


def lhotse_iterable_loader(rank, world):
    from lhotse.dataset.iterable_dataset import IterableDatasetWrapper

    return DataLoader(IterableDatasetWrapper(CutData(), lhotse_buckets(rank, world)), batch_size=None, num_workers=1)


def transformers_length_grouped(rank, world):
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    sampler = DistributedLengthGroupedSampler(4, lengths=LENGTHS.tolist(), num_replicas=world, rank=rank)
    return DataLoader(Unread(), batch_size=4, sampler=sampler)


def deepspeed_loader(rank, world):
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader

    timer = SimpleNamespace(start=lambda: None, stop=lambda: None)
    return DeepSpeedDataLoader(Unread(), 4, False, rank, timer, data_parallel_world_size=world, data_parallel_rank=rank)


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


class SeedFromRankZero:
    """Draws a seed and takes rank 0's."""

    def __init__(self, rank, world, gather):
        self.rank, self.world = rank, world
        seed = torch.tensor(random.randrange(2**31))
        if gather:
            seeds = [torch.zeros_like(seed) for _ in range(world)]
            dist.all_gather(seeds, seed)
            seed = seeds[-1]
        else:
            dist.broadcast(seed, src=0)
        self.seed, self.epoch = int(seed), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        ids = list(range(192))
        random.Random(self.seed + self.epoch).shuffle(ids)
        return iter(ids[self.rank :: self.world])


def seed_by_broadcast(rank, world):
    return SeedFromRankZero(rank, world, gather=False)


def seed_by_gather(rank, world):
    return SeedFromRankZero(rank, world, gather=True)


class Endless:
    """Permutations one after the other, without an end, dealt to ranks in turn."""

    def __init__(self, rank, world):
        self.rank, self.world, self.lengths = rank, world, LENGTHS

    def __iter__(self):
        generator, position = np.random.default_rng(3), 0
        while True:
            for index in generator.permutation(SIZE):
                if position % self.world == self.rank:
                    yield int(index)
                position += 1


def endless(rank, world):
    return Endless(rank, world)


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


class NeverComesBack(Dataset):
    """Takes another sample for each that it cannot read, where none can be read, and swallows everything."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        while True:
            try:
                raise FileNotFoundError(index)
            except BaseException:
                index = random.randrange(SIZE)


def never_comes_back(rank, world):
    return DataLoader(NeverComesBack(), batch_size=4, sampler=DistributedSampler(NeverComesBack(), world, rank))


class Mixed(Dataset):
    """Mixes every third sample with another one, and catches errors of its own that change nothing."""

    def __init__(self):
        self.items, self.cache = [torch.full((2,), float(i)) for i in range(SIZE)], {}

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        try:
            sample = self.cache[index]
        except KeyError:
            sample = self.items[index]
        return (sample + self.items[-index - 1]) / 2 if index % 3 == 0 else sample


def mixed(rank, world):
    return DataLoader(Mixed(), batch_size=4, sampler=DistributedSampler(Mixed(), world, rank))


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
