"""Process groups of the script: a fake group with the requested number of ranks, of which this process is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.parallel.distributed as ddp
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.device.virtual.fake_group import fake_world, with_buckets
from memfit.device.virtual.patching import replaced
from memfit.device.virtual.redirect import redirected
from memfit.script.tracer import ScriptTracer
from memfit.torch_compat.distributed import DISTRIBUTE_REGION, OffsetBasedRNGTracker

_NCCL = (2, 27, 3)
"""The answer of ``torch.cuda.nccl.version``: that of the wheels of torch 2.9 and later."""


@contextmanager
def script_ranks(tracer: ScriptTracer, on_group: Callable[[int], None]) -> Iterator[None]:
    """Context in which ``init_process_group`` of any backend makes a fake group of WORLD_SIZE ranks; ``spawn`` and
    ``start_processes`` run rank 0. ``on_group`` is called with the ranks of a group that is not one of the CPU alone.
    """
    with ExitStack() as stack:
        backend = ["nccl"]
        initialize, destroy = dist.init_process_group, dist.destroy_process_group

        def init_process_group(
            asked: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
            *rest: Any, **kwargs: Any,
        ) -> None:  # fmt: skip
            if dist.is_initialized():
                raise ValueError("trying to initialize the default process group twice!")
            backend[0] = str(asked or kwargs.get("backend") or "nccl")
            ranks = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
            which = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
            check_fake_ranks(f"init_process_group(world_size={ranks})", ranks)
            with (
                _all_replaced("init_process_group", initialize), _all_replaced("destroy_process_group", destroy),
            ):  # fmt: skip
                stack.enter_context(fake_world(ranks, rank=which, quiet=tracer.quiet))
            if backend[0] != "gloo":
                on_group(ranks)

        everywhere: dict[str, Callable[..., Any]] = {
            "init_process_group": init_process_group,
            "destroy_process_group": lambda group=None: None,
            "get_backend": lambda group=None: backend[0],
            "is_nccl_available": lambda: True,
            "barrier": lambda *args, **kwargs: None,
            "monitored_barrier": lambda *args, **kwargs: None,
            "all_gather_object": lambda gathered, value, group=None: gathered.__setitem__(
                slice(None), [value] * len(gathered)
            ),
            "gather_object": lambda value, gathered=None, *args, **kwargs: (
                gathered is not None and gathered.__setitem__(slice(None), [value] * len(gathered))
            ),
            "broadcast_object_list": lambda *args, **kwargs: None,
            "scatter_object_list": lambda out, values, *args, **kwargs: out.__setitem__(0, values[0]),
        }
        for name, function in everywhere.items():
            stack.enter_context(_all_replaced(name, function))
        stack.enter_context(replaced(mp, spawn=_spawned, start_processes=_starting(mp.start_processes)))
        stack.enter_context(replaced(mp.spawn if hasattr(mp.spawn, "spawn") else mp, spawn=_spawned))
        stack.enter_context(
            replaced(ddp.DistributedDataParallel, __init__=_wrapping(ddp.DistributedDataParallel, tracer))
        )
        stack.enter_context(replaced(OffsetBasedRNGTracker, **{DISTRIBUTE_REGION: _same_numbers}))
        stack.enter_context(replaced(torch.cuda, device_count=_device_count))
        stack.enter_context(replaced(torch.cuda.nccl, version=lambda: _NCCL))
        stack.enter_context(replaced(DeviceMesh, __init__=_mesh(DeviceMesh.__init__)))
        yield


def _device_count() -> int:
    """Cards of this machine: a script that spawns a process for each asks. On the virtual CPU there is none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if torch.cuda.is_available() else 0


def _all_replaced(name: str, function: Callable[..., Any]) -> ExitStack:
    """Replaces one function of torch.distributed under both of its names."""
    stack = ExitStack()
    for module in (dist, distributed_c10d):
        if hasattr(module, name):
            stack.enter_context(replaced(module, **{name: function}))
    return stack


def _spawned(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> None:
    """Replaces ``torch.multiprocessing.spawn`` and ``start_processes``: every rank does the same, and rank 0 runs in
    this process.
    """
    os.environ.setdefault("WORLD_SIZE", str(nprocs))
    fn(0, *args)


class _EndedProcesses:
    """What ``start_processes`` gives a caller that goes on beside the processes: they have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *args: Any, **kwargs: Any) -> bool:
        return True


def _starting(start_processes: Callable[..., Any]) -> Callable[..., Any]:
    """``start_processes`` as ``spawn``, unless torch itself calls it: torchrun's agent talks to the processes."""

    @wraps(start_processes)
    def start(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return start_processes(*args, **kwargs)
        _spawned(*args, **kwargs)
        return _EndedProcesses()

    return start


def _wrapping(kind: Any, tracer: ScriptTracer) -> Callable[..., None]:
    """DDP on the fake group: allocates its buckets, without the addresses and streams of a card."""
    initialize = kind.__init__

    def call(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        before = len(tracer.nbytes)
        initialize(self, module, None, None, *args, **kw)
        with_buckets(self)
        for bucket in range(before, len(tracer.nbytes)):
            tracer.category[bucket] = "communication"

    return call


def _same_numbers(self: Any, spec: Any, *args: Any, **kwargs: Any) -> nullcontext[None]:
    """Random numbers of a DTensor: without values, it does not matter which of them a rank draws."""
    return nullcontext()


def _mesh(initialize: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialize(self, redirected(device_type), *args, **kwargs)

    return call
