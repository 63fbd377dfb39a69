"""torch's and torchdata's loaders and samplers, used rightly."""

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from tests.audit.right.data import SIZE, Unread


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


class Clips(IterableDataset):
    """In the order of the files, a part for each rank and worker."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in range(self.rank + self.world * worker, 96, self.world * workers):
            yield {"name": f"clip{number}.wav", "wave": torch.zeros(2)}


def clips_in_their_order(rank, world):
    return DataLoader(Clips(rank, world), batch_size=4)


def clips_in_their_order_by_two_workers(rank, world):
    return DataLoader(Clips(rank, world), batch_size=4, num_workers=2)


class Named(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"id": index, "x": torch.zeros(2)}


def sources_that_each_count_their_own_ids(rank, world):
    data = ConcatDataset([Named(24), Named(40), Named(8)])
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, world, rank))
