"""Gradients summed once after the window's last backward, against DistributedDataParallel: time and memory of a rank.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=131072 torchrun --standalone --nproc-per-node 2 bench/ddp_reduction.py

Windows of one and of four micro-batches, A B A B; the peak is of the process's own bytes above what it held before.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.engine.ddp import Ddp
from memfit.engine.process_group import data_mesh, join
from memfit.train.launch import memory_limit

ROUNDS = 3


def net() -> nn.Sequential:
    """About 101 MiB of weights in 24 blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(25)))


def main() -> None:
    """Prints one line for each way and number of micro-batches."""
    join()
    x = torch.randn(64, 512)
    for micro_batches in (1, 4):
        rounds_by_name: dict[str, list[tuple[float, float]]] = {"ours": [], "DistributedDataParallel": []}
        for _ in range(2):
            for name in rounds_by_name:
                rounds_by_name[name] += run(name, micro_batches, x)
        if dist.get_rank() == 0:
            for name, pairs in rounds_by_name.items():
                seconds, peak = (statistics.median(column) for column in zip(*pairs, strict=True))
                what = f"{micro_batches} micro-batches, {name}"
                print(f"{what}: {seconds:.3f} s a window, peak {peak:.0f} MiB", flush=True)
    dist.destroy_process_group()


def run(name: str, micro_batches: int, x: torch.Tensor) -> list[tuple[float, float]]:
    """(seconds, peak MiB) of some windows, after one to warm up."""
    before = memory_limit.resident_bytes()
    model = net()
    engine = Ddp(rank=dist.get_rank(), world=dist.get_world_size(), mesh=data_mesh("cpu"))
    wrapped = None if name == "ours" else DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pairs = []
    for round_ in range(ROUNDS + 1):
        dist.barrier()
        memory_limit.reset_peak()
        begin = time.perf_counter()
        for index in range(micro_batches):
            last = index == micro_batches - 1
            with wrapped.no_sync() if wrapped is not None and not last else contextlib.nullcontext():
                ((wrapped or model)(x).square().mean() / micro_batches).backward()
        if wrapped is None:
            engine.reduce(engine.prepare(list(model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
        if round_:
            pairs.append((time.perf_counter() - begin, (memory_limit.peak_resident_bytes() - before) / 2**20))
    return pairs


if __name__ == "__main__":
    main()
