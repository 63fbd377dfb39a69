"""Ranks that join find each other by an address that no later start of the ranks reads.

python -m pytest tests/engine/test_process_group.py
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from memfit.engine import process_group
from memfit.engine.process_group import join


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """torchrun's store, on which one rank of one meets itself."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *arguments, **options: iter([(store, 0, 1)]))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    return store


@pytest.mark.parametrize("turn", ["", "unproven"])
def test_ranks_that_are_started_again_read_no_address_of_ranks_that_are_gone(board, monkeypatch, turn):
    written: list[str] = []
    fresh_store = process_group._fresh_store

    def noted(board, key, *arguments):
        store = fresh_store(board, key, *arguments)
        written.extend(key for _ in range(board.check([key])))
        return store

    monkeypatch.setattr(process_group, "_fresh_store", noted)
    join(turn)
    try:
        assert written == [f"memfit/{turn}"]
        assert not board.check(written)
    finally:
        dist.destroy_process_group()


WORKERS = """
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from memfit.engine.process_group import data_mesh, join_alone

join_alone()
group = dist.new_group([0])
nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
values, parts = torch.ones(4), torch.zeros(4)
works = [dist.all_to_all_single(parts, values, group=group, async_op=True), dist.all_reduce(values, async_op=True)]
for work in works:
    work.wait()
assert parts.tolist() == [1] * 4
names = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
groups = {id(group) for group in (dist.group.WORLD, group, data_mesh("cpu").get_group())}
print(len(groups), names.count("pt_gloo_runloop"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_group_completes_a_collective_after_the_other():
    """torch's own two workers of a group write to one string without a lock, of which a rank died."""
    ended = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, check=True)
    groups, workers = map(int, ended.stdout.split())
    if not workers:
        pytest.skip(f"torch {torch.__version__} does not name gloo's threads")
    assert 2 <= groups == workers
