"""What a module's forward raises because of an engine: parameters that are read while they are sharded, which FSDP2
gathers for calls of modules alone, and layers, sequences or experts that are divided over ranks."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from memfit.engine.collectives import is_memory_failure
from memfit.engine.lost_rank import is_lost_rank
from memfit.errors import InputError, describe, raised_by_memfit
from memfit.frame_variables import frame_variables
from memfit.job import Nets
from memfit.torch_compat.attributes import MODULE_CALL
from memfit.torch_compat.distributed import fsdp_groups


@contextmanager
def sharded_reads(nets: Nets, inside: str = "") -> Iterator[None]:
    """Around forwards and backwards.

    Args:
        inside: dimensions of the mesh whose ranks wait for each other inside of layers, such as ``tp=2``; empty: none.

    Raises:
        InputError: a sharded parameter was read outside of the forwards that gather it, or a module's forward raises
            something where ``inside`` divides what it works on.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            yield
    except InputError:
        raise
    except Exception as error:
        if is_memory_failure(error) or is_lost_rank(error):
            raise
        words = _words(nets, error, inside)
        if words is None:
            raise
        raise InputError(*words) from error


def _words(nets: Nets, error: Exception, inside: str) -> tuple[str, str, str] | None:
    """What is said of an exception; None: it is not the engine's."""
    may_be_read = isinstance(error, RuntimeError | IndexError)
    outside = _read_outside(nets, error) if may_be_read else None
    if outside is not None:
        return outside
    path = _innermost(nets, error)
    if may_be_read and "mixed torch.Tensor and DTensor" in str(error):
        return (
            f"{f'module {path}' if path else 'the loss'} on {inside or '--engine fsdp2'}",
            "a parameter is read outside of the forward of a module that holds it, where it is sharded",
            "call the module in place of reading its parameter, or write --engine ddp",
        )
    if not inside or not path or type(error).__module__ != "builtins" or raised_by_memfit(error):
        return None
    dimensions = " and ".join(part.partition("=")[0] for part in inside.split(","))
    return (
        f"module {path} on {inside}",
        f"its forward raises {describe(error)}",
        f"leave {dimensions} out of the mesh, or mend the module",
    )


def _innermost(nets: Nets, error: BaseException) -> str:
    """The path of the innermost module of a net that was running; "" where none was."""
    paths = {
        id(module): f"{name}.{path}".rstrip(".") for name, net in nets.items() for path, module in net.named_modules()
    }
    running = [frame_variables(frame).get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((paths[id(each)] for each in reversed(running) if id(each) in paths), "")


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
