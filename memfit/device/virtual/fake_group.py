"""A process group of any size in one process, for traces of one rank: collectives return at once.

FSDP2 and tensor parallelism run on it as they are; DDP needs ``wrapped_by_ddp``, and a pipeline
``simulated_neighbours``. Overlap of streams is not modelled:
a real run may free gathered parameters later. NCCL's own buffers lie outside of the allocator.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memfit.device.virtual import backend
from memfit.device.virtual.hybrid_mode import real_parameters
from memfit.device.virtual.patching import appended, replaced
from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.torch_compat.distributed import (
    CHUNKS,
    FSDP_PARAMETER,
    MAKE_GATHERED,
    MESH_ARITHMETIC,
    SHAPE_PROPAGATION,
    Chunks,
    DeviceMesh,
    FakeStore,
    ShardingPropagator,
    ddp,
    distributed_c10d,
    forget_sharding,
    fsdp_param,
    give_collectives_shapes,
    methods_of,
    tell_apart,
)
from memfit.torch_compat.pipelining import WARM_UP, check_pipelining, know_shapes, schedule_class

_cached_rank: list[tuple[int, int, str | None]] = []
"""(world, rank, mesh) of the last fake group, of which DTensor's caches are."""
_worlds = itertools.count(1)
_known_worlds: dict[tuple[int, int, str | None], int] = {}
"""Numbers of fake groups by (world, rank, mesh): where all three are equal, groups have equal names."""
Quiet = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context in which the tracer records nothing."""
_quiet: list[Quiet] = []
"""Those of the fake groups that are there."""


def is_simulated() -> bool:
    """Whether the default process group is a fake one, whose other ranks do not exist."""
    return bool(_quiet)


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Context in which the tracer of the fake group records nothing, for what other ranks do."""
    return _quiet[-1]()


def _on_real_tensors(plain: Any) -> Any:
    """A method that computes with small tensors, taken out of every mode."""
    static = isinstance(plain, staticmethod)
    function = plain.__func__ if static else plain

    def call(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes(), torch.device("cpu"):
            return function(*map(_ranks, args), **{key: _ranks(value) for key, value in kwargs.items()})

    return staticmethod(call) if static else call


def _told_apart(make: Callable[..., None], world: int) -> Callable[..., None]:
    def call(mesh: Any, /, *args: Any, **kwargs: Any) -> None:  # they have a ``mesh=`` of their own
        make(mesh, *args, **kwargs)
        tell_apart(mesh, world)

    return call


def _ranks(value: Any) -> Any:
    """A fake tensor of ranks, made in the mode, is every rank in order; anything else is itself."""
    return torch.arange(value.numel(), dtype=torch.int).view(value.shape) if isinstance(value, FakeTensor) else value


def _quietly(function: Callable[..., Any], quiet: Quiet) -> Callable[..., Any]:
    """A function that computes shapes of DTensors, without a record. On the virtual CPU, whose mode runs what it can on
    real tensors, under torch's own mode of fake tensors: the values that it would read there are none."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with quiet(), contextlib.nullcontext() if backend.is_inside() else disable_current_modes():
            return function(*args, **kwargs)

    return call


def _of_same_storage(make: Callable[[Any], None]) -> Callable[[Any], None]:
    """A method that makes parameters of tensors whose storages FSDP2 empties and fills again."""

    def call(parameter: Any) -> None:
        with real_parameters():
            make(parameter)

    return call


def _new_group(make: Callable[..., Any]) -> Callable[..., Any]:
    """``new_group`` of the default group's backend, the fake one: any other waits for ranks that are not there."""
    signature = inspect.signature(make)

    @wraps(make)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return make(**{name: value for name, value in given.items() if name not in ("backend", "pg_options")})

    return new_group


def _current_stream(device: Any = None) -> Any:
    """Of ``torch.accelerator``; dynamo refuses a function that is ``torch.cuda.current_stream`` too."""
    return backend.current_stream(device)


@contextlib.contextmanager
def fake_world(
    world: int, *, rank: int = 0, quiet: Quiet = contextlib.nullcontext, mesh: str | None = None
) -> Iterator[None]:
    """The default process group has ``world`` ranks, of which this process is ``rank``.

    Args:
        mesh: the only mesh that will be made of them, in words; None: not known.
        quiet: the first use of each DTensor operator computes shapes on tensors of the global shape, which are never
            allocated in a real run: that happens in ``quiet()``.
    """
    arithmetic = {name: _on_real_tensors(method) for name, method in methods_of(DeviceMesh, MESH_ARITHMETIC).items()}
    number = next(_worlds) if mesh is None else _known_worlds.setdefault((world, rank, mesh), next(_worlds))
    arithmetic["__init__"] = _told_apart(arithmetic["__init__"], number)
    shapes = {
        name: _quietly(getattr(ShardingPropagator, name), quiet)
        for name in methods_of(ShardingPropagator, SHAPE_PROPAGATION)
    }
    give_collectives_shapes()
    if _cached_rank != [(world, rank, mesh)]:
        forget_sharding()
        _cached_rank[:] = [(world, rank, mesh)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(Tensor, record_stream=lambda self, stream: None))
        if backend.is_inside():
            stack.enter_context(replaced(torch.accelerator, current_stream=_current_stream))
        stack.enter_context(replaced(DeviceMesh, **arithmetic))
        stack.enter_context(replaced(ShardingPropagator, **shapes))
        stack.enter_context(replaced(fsdp_param, **{CHUNKS: Chunks}))
        stack.enter_context(
            replaced(FSDP_PARAMETER, **{MAKE_GATHERED: _of_same_storage(getattr(FSDP_PARAMETER, MAKE_GATHERED))})
        )
        stack.enter_context(
            replaced(
                ddp,
                _verify_param_shape_across_processes=lambda *args, **kwargs: None,
                _sync_module_states=lambda *args, **kwargs: None,
            )
        )
        stack.enter_context(replaced(sys, excepthook=sys.excepthook))  # a process group puts its rank before every line
        stack.enter_context(replaced(dist.ProcessGroup, monitored_barrier=lambda group, *args, **kwargs: None))
        for module in (dist, distributed_c10d):
            stack.enter_context(replaced(module, new_group=_new_group(module.new_group)))
        with disable_current_modes():
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(appended(_quiet, quiet))
        yield


@contextlib.contextmanager
def simulated_neighbours() -> Iterator[None]:
    """Inside, schedules of a pipeline send nothing before their first micro-batch, whose value no simulated rank has,
    and what is sent and received at once is so one by one: a fake group has no backend for a virtual card.

    What is sent is there for as long as its work is, as with gloo (``SendWork``) and NCCL
    (``ProcessGroupNCCL::pointToPoint`` keeps it in ``outputs_``): GPipe and interleaved schedules keep all works.
    """

    check_pipelining()
    send, receive = dist.isend, dist.irecv

    def one_by_one(operations: list[dist.P2POp]) -> list[Any]:
        peers = [{"group_dst" if op.op is dist.isend else "group_src": op.group_peer} for op in operations]
        return [
            op.op(op.tensor, group=op.group, tag=op.tag, **peer) for op, peer in zip(operations, peers, strict=True)
        ]

    def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Sent(send(tensor, *args, **kwargs), tensor)

    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" and tensor.is_floating_point():
            _fill(tensor)
        return receive(tensor, *args, **kwargs)

    with (
        replaced(schedule_class(), **{WARM_UP: know_shapes}),
        replaced(dist, batch_isend_irecv=one_by_one, isend=kept, irecv=filled),
        replaced(distributed_c10d, isend=kept, irecv=filled),
    ):
        yield


def _fill(tensor: Tensor) -> None:
    """Gives a real tensor numbers, as what another rank sends has: what its memory held before may be none, and a loss
    that is computed of it is none either."""
    with unrecorded(), torch.no_grad():
        tensor.detach().normal_(generator=torch.Generator().manual_seed(0))


class _Sent:
    """The work of a send, which holds the tensor."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, *args: Any) -> Any:
        return self._work.wait(*args)


@contextlib.contextmanager
def predicted_ranks(
    world: int, *, rank: int = 0, quiet: Quiet = contextlib.nullcontext, mesh: str | None = None
) -> Iterator[None]:
    """``fake_world``, and the variables that torchrun sets: code of a job that asks for its rank is answered.

    In a process that has a group already, that group answers for a single rank. Of one rank the variables that make
    libraries start a group of their own (LOCAL_RANK) are not set.
    """
    if world == 1 and dist.is_initialized():
        yield
        return
    variables = {"RANK": rank, "WORLD_SIZE": world}
    if world > 1:
        variables |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    with (
        _environment({name: str(value) for name, value in variables.items()}),
        fake_world(world, rank=rank, quiet=quiet, mesh=mesh),
    ):
        yield


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Reducer:
    """DDP's reducer, whose buckets stay as they were made: their rebuilding reads tensors' addresses."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _all_reduced(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_all_reduced.__annotations__.clear()
"""DDP wants its own types there, or none; ours are strings."""


def wrapped_by_ddp(module: nn.Module, **options: Any) -> ddp.DistributedDataParallel:
    """DistributedDataParallel over the fake group, with its buckets; ``options`` are its own.

    Its buckets are not rebuilt after the first window, as a real run's are once: their bytes are the same, their order
    is not.
    """
    wrapped = ddp.DistributedDataParallel(module, **options)
    with_buckets(wrapped)
    return wrapped


def with_buckets(wrapped: ddp.DistributedDataParallel) -> None:
    """A DistributedDataParallel that was just made: its gradients are reduced at once, in the buckets as they are."""
    wrapped.register_comm_hook(None, _all_reduced)
    wrapped.reducer = _Reducer(wrapped.reducer)
