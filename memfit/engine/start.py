"""The engine of a name, on the process group at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memfit.engine.ddp import Ddp
from memfit.engine.fsdp2 import Fsdp2
from memfit.engine.mesh import data_mesh
from memfit.engine.protocol import Engine
from memfit.engine.single import Single
from memfit.engine.zero import Zero
from memfit.errors import InputError

_ON_RANKS: dict[str, Callable[..., Engine]] = {
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "zero1": partial(Zero, stage=1),
    "zero2": partial(Zero, stage=2),
    "zero3": partial(Zero, stage=3),
}


def start(name: str, device: torch.device, **how: Any) -> Engine:
    """The engine that --engine names, over every rank of the default process group (real or fake).

    Args:
        how: the engine's own choices, as ``Fsdp2`` has them.

    Raises:
        InputError: no such engine, or one of several ranks without a process group.
    """
    if name == "single":
        return Single()
    if not dist.is_initialized():
        raise InputError(f"--engine {name}", "no process group was joined", "start it with torchrun, or memfit run")
    if name not in _ON_RANKS:
        known = ", ".join(("single", *_ON_RANKS))
        raise InputError(f"--engine {name}", "this memfit has no such engine yet", f"write one of {known}")
    return _ON_RANKS[name](rank=dist.get_rank(), world=dist.get_world_size(), mesh=data_mesh(device.type), **how)
