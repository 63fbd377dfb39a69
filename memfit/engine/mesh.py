"""The ranks of a run: who they are, by what torchrun says, and their mesh."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA = "data"
"""The mesh's dimension of ranks that share a window. Sharding, tensor and pipeline dimensions go beside it."""
TIMEOUT_SECONDS = 120.0
"""A collective that waits longer has lost a rank: the process ends, and torchrun starts all of them again."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What torchrun tells a process of itself."""

    rank: int
    local_rank: int
    world: int


def launched() -> Launched | None:
    """This process's place among those that torchrun started; None where it was not."""
    try:
        return Launched(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
            world=int(os.environ["WORLD_SIZE"]),
        )
    except (KeyError, ValueError):
        return None


def join(device: torch.device) -> None:
    """Joins the default process group: gloo for the host's tensors, NCCL for a card's."""
    seconds = float(os.environ.get("MEMFIT_COLLECTIVE_SECONDS", TIMEOUT_SECONDS))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def data_mesh(device_type: str) -> DeviceMesh:
    """A mesh of every rank of the default group, all of them data-parallel."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(DATA,))
