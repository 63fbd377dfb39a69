"""Targets that cannot be audited, and some for real processes."""

import torch
import torch.distributed as dist


def takes_one(rank):
    return [[rank]]


def gives_none(rank, world):
    return None


def fails(rank, world):
    raise KeyError("here")


def gathers(rank, world):
    """A permutation from a seed that all ranks make together, which only a real group (or a replay) gives."""
    seed = torch.tensor(rank + 1)
    dist.all_reduce(seed)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(int(seed))).tolist()
    return [[index] for index in ids[rank::world]]


def hangs(rank, world):
    if rank == 0:
        dist.barrier()
        dist.barrier()
    return [[rank]]


def fails_on_rank_one(rank, world):
    if rank == 1:
        raise KeyError("here")
    return [[rank]]
