"""Ranks that join find each other by an address that no later start of the ranks reads.

python -m pytest tests/engine/test_process_group.py
"""

import pytest
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
