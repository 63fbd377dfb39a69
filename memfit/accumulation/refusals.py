"""What a guard refuses when it is made, with the line that makes it: what could not be undone after a failure."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from memfit.accumulation.ranks import RankGroup
from memfit.errors import InputError
from memfit.torch_compat.attributes import has_communication_hook


def refuse_inexact(
    optimizers: Sequence[Optimizer], modules: Sequence[nn.Module], ranks: RankGroup, *, repeat: bool
) -> None:
    """Raises InputError where a window could not be accumulated exactly, or not be repeated."""
    seen = f"{_line()}: memfit.guard"
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            write = "write memfit.guard(optimizer, model) with an optimizer of torch"
            raise InputError(seen, f"{type(optimizer).__name__} is no torch.optim.Optimizer", write)
        if isinstance(optimizer, LBFGS):
            raise InputError(seen, "LBFGS runs the forward inside its step", "write another optimizer")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise InputError(seen, f"{type(module).__name__} is no nn.Module", "write memfit.guard(optimizer, model)")
        if is_deepspeed_engine(module):
            write = "write memfit.deepspeed.guard(engine)"
            raise InputError(seen, "a DeepSpeed engine reduces gradients by itself", write)
    parts = [part for module in modules for part in module.modules()]
    if any(isinstance(part, FullyShardedDataParallel) for part in parts):
        write = "write torch.distributed.fsdp.fully_shard(model)"
        raise InputError(seen, "FullyShardedDataParallel (FSDP1) cannot leave out its reduction exactly", write)
    if any(isinstance(part, DataParallel) for part in parts):
        write = "write DistributedDataParallel and torchrun"
        raise InputError(seen, "DataParallel splits each batch by itself", write)
    if any(isinstance(part, DistributedDataParallel) and has_communication_hook(part) for part in parts):
        raise InputError(seen, "a DDP communication hook changes what is reduced", "leave register_comm_hook out")
    if ranks.world > 1 and repeat:
        if ranks.sharded:
            write = "write memfit.guard(..., repeat=False), and let torchrun start again from a checkpoint"
            raise InputError(seen, "FSDP2's ranks meet in every forward: one cannot repeat alone", write)
        if any(isinstance(part, nn.SyncBatchNorm) for part in parts):
            write = "write memfit.guard(..., repeat=False), or keep BatchNorm as it is"
            raise InputError(seen, "SyncBatchNorm's ranks meet in every forward: one cannot repeat alone", write)
    held = {id(p) for module in modules for p in module.parameters()}
    if modules and not any(id(p) in held for o in optimizers for group in o.param_groups for p in group["params"]):
        raise InputError(seen, "the optimizer steps no parameter of the model", "write the model that it was made for")


def refuse_unnamed_wrapper(parameters: Sequence[nn.Parameter], ranks: RankGroup) -> None:
    """Raises InputError where DDP or FSDP2 holds the parameters, and the guard was given no such model.

    Its backwards would reduce by themselves, and the units of the other ranks would be left out.
    """
    if ranks.world > 1 or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    held = {id(p) for p in parameters}
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    names = ["DistributedDataParallel" for each in wrappers if any(id(p) in held for p in each.parameters())]
    names += ["FSDP2" for p in parameters if isinstance(p, DTensor)]
    if names:
        write = "write memfit.guard(optimizer, model) with the model that is called in the forward"
        raise InputError("memfit.guard", f"{names[0]} holds its parameters, and the guard was not given it", write)


def is_deepspeed_engine(module: object) -> bool:
    """Whether it is an engine that ``deepspeed.initialize`` made; DeepSpeed is not imported to tell."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__)


def _line() -> str:
    """The innermost line outside of memfit."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("memfit."):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
