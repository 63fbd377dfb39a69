"""Real gloo ranks of a mesh."""

from pathlib import Path
from typing import Any

import torch

from memfit.mesh import parse_mesh
from testing.rank_copies import run_ranks


def results_of_ranks(module: str, folder: Path, mesh: str, *cases: str) -> list[Any]:
    """What the ranks of a mesh wrote, each of which ran ``tests.engine.MODULE``."""
    world = parse_mesh(mesh).world
    run_ranks(world, f"tests.engine.{module}", [str(folder), mesh, *cases], timeout=300, MEMFIT_COLLECTIVE_SECONDS="60")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
