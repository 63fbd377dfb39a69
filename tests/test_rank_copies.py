"""Ranks of a test that fail, end the others, and leave the process that is copied ready for the next ones."""

import os
import sys
import time

import pytest

from testing.rank_copies import run_ranks

RANK = __name__


def main():
    rank, (what, folder) = os.environ["RANK"], sys.argv[1:]
    if what == "fails" and rank == "1":
        raise ValueError("a rank that fails")
    if what != "ends":
        time.sleep(60)
    with open(os.path.join(folder, rank), "w") as file:
        file.write(f"{os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']} {os.environ['OWN']}")


def test_a_rank_that_fails_ends_the_others_and_the_next_ranks_are_started(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 ended with 1"):
        run_ranks(2, RANK, ["fails", str(tmp_path)])
    assert not list(tmp_path.iterdir())
    run_ranks(2, RANK, ["ends", str(tmp_path)], OWN="own")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 0 own", "2 1 own"]


def test_ranks_that_do_not_end_are_killed(tmp_path):
    with pytest.raises(TimeoutError, match="more than"):
        run_ranks(2, RANK, ["waits", str(tmp_path)], timeout=0.5)
    run_ranks(1, RANK, ["ends", str(tmp_path)], OWN="own")
    assert (tmp_path / "0").read_text() == "1 0 own"
