"""Real gloo ranks of a mesh, started by torchrun."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from memfit.mesh import parse_mesh

ROOT = Path(__file__).parents[2]


def results_of_ranks(module: str, folder: Path, mesh: str, *cases: str) -> list[Any]:
    """What the ranks of a mesh wrote, each of which ran ``tests.engine.MODULE``."""
    world = parse_mesh(mesh).world
    arguments = ["--standalone", "--nproc-per-node", str(world), "-m", f"tests.engine.{module}", str(folder), mesh]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, *cases], cwd=ROOT, check=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_COLLECTIVE_SECONDS": "60"},
    )  # fmt: skip
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
