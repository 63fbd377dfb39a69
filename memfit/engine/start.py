"""The engine of a name, on the process group at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memfit.engine.ddp import Ddp
from memfit.engine.fsdp2 import Fsdp2
from memfit.engine.mesh import data_mesh
from memfit.engine.protocol import Engine
from memfit.engine.single import Single
from memfit.errors import InputError

_ON_RANKS: dict[str, Callable[..., Engine]] = {"ddp": Ddp, "fsdp2": Fsdp2}


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
    check_known(name)
    return _ON_RANKS[name](rank=dist.get_rank(), world=dist.get_world_size(), mesh=data_mesh(device.type), **how)


def check_known(name: str) -> None:
    """Raises InputError where there is no such engine."""
    known = ("single", *_ON_RANKS)
    if name not in known:
        raise InputError(f"--engine {name}", "this memfit has no such engine yet", f"write one of {', '.join(known)}")
