"""Meshes of several dimensions with real gloo processes: the same steps as one rank, and any mesh reads any checkpoint.

python -m pytest tests/engine/test_mesh_engines.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.engine.single import Single
from tests.engine.mesh_ranks import READERS, STATES, STEPS
from tests.engine.test_fsdp2 import compare
from tests.engine.zero_ranks import loaded, saved

ROOT = Path(__file__).parents[2]


def four(folder, *cases):
    """What four ranks gave."""
    arguments = ["--standalone", "--nproc-per-node", "4", "-m", "tests.engine.mesh_ranks", str(folder), *cases]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments], cwd=ROOT, check=True, timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_COLLECTIVE_SECONDS": "60"},
    )  # fmt: skip
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


def test_two_sharded_replicas_take_the_steps_of_one_rank(tmp_path):
    compare(four(tmp_path, "blocks"), "blocks")


@pytest.mark.slow
def test_two_sharded_replicas_take_the_steps_of_one_rank_in_every_case(tmp_path):
    ranks = four(tmp_path, *STEPS)
    for case in STEPS:
        compare(ranks, case)


def same(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_mesh_and_one_device_go_on_with_what_the_other_wrote(tmp_path):
    expected = saved(Single(), tmp_path / "single")
    for rank in four(tmp_path, STATES):
        same(rank["saved"], expected)
        for writer in ("hybrid", "single"):
            for reader in READERS:
                same(rank[writer, reader], expected)
    same(loaded(Single(), tmp_path / "hybrid"), expected)
