"""The engine of a name, on the process group at hand."""

from __future__ import annotations

import torch
import torch.distributed as dist

from memfit.engine.ddp import Ddp
from memfit.engine.mesh import data_mesh
from memfit.engine.protocol import Engine
from memfit.engine.single import Single
from memfit.errors import InputError


def start(name: str, device: torch.device) -> Engine:
    """The engine that --engine names, over every rank of the default process group (real or fake).

    Raises:
        InputError: no such engine, or one of several ranks without a process group.
    """
    if name == "single":
        return Single()
    if not dist.is_initialized():
        raise InputError(f"--engine {name}", "no process group was joined", "start it with torchrun, or memfit run")
    if name == "ddp":
        return Ddp(rank=dist.get_rank(), world=dist.get_world_size(), mesh=data_mesh(device.type))
    raise InputError(f"--engine {name}", "this memfit has no such engine yet", "write --engine single or --engine ddp")
