"""Process groups whose ranks no launcher of the command names."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

TEXT = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("{backend}", rank=0, world_size={world}, init_method="tcp://127.0.0.1:29511")
net = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(4, 256).cuda()).sum().backward()
    optimizer.step()
torch.save(net.state_dict(), "net.pt")
"""


@pytest.mark.parametrize(("backend", "world", "joined"), [("nccl", 2, 2), ("nccl", 1, 1), ("gloo", 2, 1)])
def test_the_memory_of_nccl_is_counted_where_the_script_joins_ranks_itself(
    tmp_path: Path, backend: str, world: int, joined: int
) -> None:
    """As ``accelerate launch``, which sets the ranks by itself, or a script that spawns them."""
    outcome = trace_here(tmp_path, TEXT.format(backend=backend, world=world))
    assert outcome.error is None, outcome.error.text
    assert outcome.world == joined
    assert outcome.footprint is not None
    train = outcome.footprint.phases["train"]
    assert (train.process_bytes - train.reserved_bytes > 700 << 20) == (joined > 1)


GATHERS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
control = dist.new_group(backend="gloo")
net = DistributedDataParallel(nn.Linear(256, 256).cuda())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    out = net(torch.randn(4 + step, 256).cuda())
    out.sum().backward()
    optimizer.step()
    size = torch.tensor(out.shape, device="cuda")
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    assert all(bool((each == size).all()) for each in sizes)
    into = torch.empty(2 * dist.get_world_size(), dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(into, size)
    assert into.tolist() == [4 + step, 256] * dist.get_world_size()
    largest = torch.stack(sizes).max(dim=0).values
    padded = nn.functional.pad(out.detach(), (0, int(largest[1]) - out.shape[1], 0, int(largest[0]) - out.shape[0]))
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    torch.stack([part[: rows, : columns] for part, (rows, columns) in zip(parts, [size.tolist() for size in sizes])])
    control.monitored_barrier()
    dist.monitored_barrier(group=control)
torch.save(net.state_dict(), "net.pt")
"""


def test_ranks_gather_sizes_as_their_own_and_make_groups_of_other_backends(tmp_path: Path) -> None:
    """As a metric that gathers tensors of different sizes over all ranks, and a barrier in a group of gloo."""
    outcome = trace_here(tmp_path, GATHERS, world=2)
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 3


STARTED = """
import torch
import torch.multiprocessing as mp
from torch import nn

def train(rank, size):
    net = nn.Linear(size, size).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(4, size).cuda()).sum().backward()
        optimizer.step()

if __name__ == "__main__":
"""


def test_processes_that_torch_starts_run_as_the_first_rank(tmp_path: Path) -> None:
    start = "mp.start_processes(fn=train, args=(64,), nprocs=2, join=False, start_method='spawn')"
    text = f"{STARTED}    started = {start}\n    while not started.join():\n        pass\n"
    outcome = trace_here(tmp_path, text)
    assert outcome.error is None
    assert outcome.windows == 3


@pytest.mark.parametrize(
    "start",
    [
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])",
        "process = mp.get_context('fork').Process(target=print); process.start(); process.join()",
    ],
)
def test_a_script_that_trains_in_other_processes_is_answered_with_that(tmp_path: Path, start: str) -> None:
    outcome = trace_here(tmp_path, f"{STARTED}    {start}\n")
    assert outcome.ended == "the script ended; it started other processes, which a trace does not follow"
