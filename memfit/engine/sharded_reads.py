"""Parameters that are read while they are sharded: FSDP2 gathers them for calls of modules alone."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from memfit.engine.collectives import is_memory_failure
from memfit.engine.lost_rank import is_lost_rank
from memfit.errors import InputError
from memfit.frame_variables import frame_variables
from memfit.job import Nets
from memfit.torch_compat.attributes import MODULE_CALL
from memfit.torch_compat.distributed import fsdp_groups


@contextmanager
def sharded_reads(nets: Nets) -> Iterator[None]:
    """Around forwards and backwards.

    Raises:
        InputError: a sharded parameter was read outside of the forwards that gather it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            yield
    except (RuntimeError, IndexError) as error:
        if is_memory_failure(error) or is_lost_rank(error):
            raise
        outside = _read_outside(nets, error)
        if outside is not None:
            raise InputError(*outside) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise InputError(
            "a net's parameter on --engine fsdp2",
            "it is read outside of the forward of a module that holds it, where it is sharded",
            "call the module in place of reading its parameter, or write --engine ddp",
        ) from error


def _read_outside(nets: Nets, error: BaseException) -> tuple[str, str, str] | None:
    """What is said of the innermost module that was running, where it is sharded: a method of it was called that is not
    its forward. None elsewhere: a module is gathered while its forward runs, and a call of it may fail before."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = [(frame_variables(frame).get("self"), frame.f_code.co_name == MODULE_CALL) for frame in frames]
    modules = [module for module, _ in running if isinstance(module, nn.Module)]
    called = [module for module, is_call in running if is_call]
    for name, net in nets.items():
        for path, module in net.named_modules():
            if not modules or module is not modules[-1] or module is net:
                continue
            block = _unit_of(net, path)
            if not block or net.get_submodule(block) in called:
                continue
            if any(not group.is_unsharded for group in fsdp_groups(net.get_submodule(block))):
                return (
                    f"module {name}.{path} on --engine fsdp2",
                    "a method of it that is not its forward reads parameters, which only forwards gather",
                    "read them in a forward, leave dp_shard out of the mesh, or write --engine ddp",
                )
    return None


def _unit_of(net: nn.Module, path: str) -> str:
    """The path of the block that gathers a module's parameters; "" where the net itself does."""
    parts = path.split(".")
    blocks = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((block for block in blocks if isinstance(net.get_submodule(block), FSDPModule)), "")
