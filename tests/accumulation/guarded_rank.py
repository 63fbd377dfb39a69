"""One rank of a guarded training: torchrun --nproc-per-node 2 guarded_rank.py WRAPPER FILE FAILURES.

Each window ends with a micro-batch without a valid unit. Rank 1's backwards with these numbers fail. Rank 0 writes the
weights.
"""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import memfit
from memfit.errors import InputError
from tests.accumulation.nets import RANK_SIZES, Failures, Net, mean_loss, mean_over_nothing, windows


def main() -> None:
    wrapper, file, failures = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net: nn.Module = Net()
    if wrapper == "fsdp2":
        fully_shard(net)
        sizes = {0: (4, 3), 1: (2, 6)}[rank]
    else:
        Failures(net, {int(number) for number in failures.split(",") if number} if rank == 1 else set())
        net = nn.parallel.DistributedDataParallel(net)
        sizes = RANK_SIZES[rank]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if wrapper == "fsdp2":
        with pytest.raises(InputError, match="cannot repeat alone"):
            memfit.guard(optimizer, net)
    guard = memfit.guard(optimizer, net, repeat=wrapper != "fsdp2")
    if wrapper == "fsdp2":
        with pytest.raises(InputError, match="a rank has 1 micro-batches in this window and another 2"):
            next(guard.window(windows(1, sizes)[0][: rank + 1]))
    for models in ([], [net.module] if wrapper == "ddp" else []):
        with pytest.raises(InputError, match="holds its parameters, and the guard was not given it"):
            next(memfit.guard(optimizer, *models).window(windows(1, sizes)[0]))
    for batches in windows(3, sizes):
        for part in guard.window([*batches, None]):
            with part as batch:
                if batch is not None:
                    guard.backward(mean_loss(net, batch), len(batch[0]))
                elif wrapper == "fsdp2":
                    guard.backward(mean_loss(net, batches[0]), 0)
                else:
                    guard.backward(mean_over_nothing(net, batches[0][0]), 0)
        optimizer.step()
        optimizer.zero_grad()
    if wrapper == "ddp" and rank == 1:
        assert guard.failures == len([number for number in failures.split(",") if number]), guard.failures
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in net.parameters()]
    if rank == 0:
        torch.save(weights, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
