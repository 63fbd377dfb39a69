"""The process group and mesh of a run's ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA = "data"
"""The mesh's dimension of ranks that share a window. Sharding, tensor and pipeline dimensions go beside it."""
TIMEOUT_SECONDS = 120.0
"""A collective that waits longer has lost a rank: the process ends, and torchrun starts all of them again."""


def join() -> None:
    """Joins the default process group, once all ranks have: gloo for the host's tensors, NCCL for a card's."""
    seconds = float(os.environ.get("MEMFIT_COLLECTIVE_SECONDS", TIMEOUT_SECONDS))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def data_mesh(device_type: str) -> DeviceMesh:
    """A mesh of every rank of the default group, all of them data-parallel."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(DATA,))


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or waits elsewhere."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
