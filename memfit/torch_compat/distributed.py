"""torch's private names of distributed training."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from memfit.installation import release_number
from memfit.torch_compat.versions import lacks

try:
    import torch.distributed._functional_collectives as functional
    import torch.distributed.distributed_c10d as distributed_c10d
    import torch.nn.parallel.distributed as ddp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import _resolve_process_group
    from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor._random import OffsetBasedRNGTracker
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

MESH_ARITHMETIC = (
    "__init__", "_compute_coordinates_from_mesh", "_concatenate", "_flatten", "_unflatten", "__getitem__",
)  # fmt: skip
"""Methods of DeviceMesh that compute with tensors of ranks; a version has some of them."""
DISTRIBUTE_REGION = "_distribute_region"
"""For patches of OffsetBasedRNGTracker: the context of random operators on DTensors."""
SHAPE_PROPAGATION = (
    "_propagate_tensor_meta", "_propagate_tensor_meta_non_cached", "_propagate_tensor_meta_cached",
)  # fmt: skip
"""Methods of ShardingPropagator that compute shapes on tensors of the global shape; a version has some of them."""
CHUNKS = "_chunk_with_empty"
"""For patches of ``fsdp_param``: what cuts a parameter into the shards of all ranks."""
FSDP_PARAMETER: Any = fsdp_param.FSDPParam
MAKE_GATHERED = "init_unsharded_param"
"""For patches of FSDP_PARAMETER: what makes a parameter of a tensor that was gathered."""


def gives_parts(node: Any, over: DeviceMesh) -> bool | None:
    """Of the autograd node of ``DTensor.to_local``: whether every rank has a part of the tensor, or of its gradient.
    False for other functions written in Python, which may sum over ranks; None for operators of torch, functions
    with a true ``keeps_parts``, and DTensors of other ranks alone, as of parts of a sequence in attention.

    Args:
        over: the ranks that are asked about, by the names of dimensions.
    """
    if not issubclass(type(node), BackwardCFunction):
        return None
    kind = type(node).__name__
    if kind == "_FromTorchTensorBackward":
        names = ("forward_input_device_mesh", "previous_device_mesh")  # of torch 2.13, and of older versions
        mesh = next((getattr(node, name) for name in names if hasattr(node, name)), over)
        return False if _dimensions_of(mesh, over) else None
    if kind != "_ToTorchTensorBackward":
        function = getattr(node, "_forward_cls", None)
        return None if getattr(function, "keeps_parts", False) else False
    dimensions = _dimensions_of(node.dtensor_spec.mesh, over)
    if not dimensions:
        return None
    ways = node.dtensor_spec.placements, node.grad_placements or ()
    placed, flowing = ([some[number] for number in dimensions] if some else [] for some in ways)
    return any(way.is_partial() for way in flowing) or any(way.is_shard() for way in placed)


def _dimensions_of(mesh: DeviceMesh, over: DeviceMesh) -> list[int]:
    """Places of a mesh's dimensions that another has too: all, where a mesh has no names."""
    names, others = mesh.mesh_dim_names, over.mesh_dim_names
    return [place for place in range(mesh.ndim) if not names or not others or names[place] in others]


OWN_VALUES: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(distribute_tensor).parameters else {}
)
"""For ``distribute_tensor`` and ``parallelize_module``: every rank takes its part of its own whole tensor. Before torch
2.7 they have no such choice, and take rank 0's, which is the same where all ranks have the same values."""


def with_joined(mesh: DeviceMesh, names: tuple[str, ...], joined: tuple[str, ...]) -> DeviceMesh:
    """Dimensions of a mesh of all ranks, of which the last ones are one dimension together.

    Args:
        names: the dimensions, in the mesh's order.
        joined: the last of them, which are neighbours.
    """
    flat = joined_dimension(mesh, joined)
    whole = (*names[: -len(joined)], "_".join(joined))
    return mesh[whole] if len(whole) > 1 else flat


def joined_dimension(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Neighbouring dimensions of a mesh as one, whose name has theirs; one dimension as it is."""
    together: Any = mesh[names]
    flat: DeviceMesh = together._flatten("_".join(names)) if len(names) > 1 else together
    return flat


def all_to_all_rows(rows: Tensor, received: list[int], sent: list[int], mesh: DeviceMesh) -> Tensor:
    """Rows of a contiguous tensor to other ranks of a mesh of one dimension, and theirs to this one, by rank.

    Args:
        received: rows from each rank.
        sent: rows to each rank.
    """
    return functional.wait_tensor(functional.all_to_all_single(rows, received, sent, mesh))


def is_strided(placement: Any) -> bool:
    """Whether a placement's pieces lie apart in the tensor: those of FSDP2 where a later dimension cuts it too."""
    return type(placement).__name__ == "_StridedShard"


def summed(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of a tensor over the ranks of a mesh of one dimension."""
    return functional.wait_tensor(functional.all_reduce(tensor, "sum", mesh))


def group_words(group: Any) -> str:
    """What torch calls a process group, given itself or its name: ``mesh_tp`` of a mesh's dimension."""
    resolve: Any = _resolve_process_group
    known = resolve(group) if isinstance(group, str) else group
    return str(known.group_desc)


def unboxed_group(value: Any) -> Any:
    """The process group that an operator of ``c10d`` was given."""
    return torch.distributed.ProcessGroup.unbox(value)


def tell_apart(mesh: Any, world: int) -> None:
    """Makes a mesh unequal to those of other worlds, of which DTensor's caches hold groups that are gone.

    Args:
        world: a number of the process group that it is a mesh of; takes the place of the thread's, which tells meshes
            of torch's threaded ranks apart.
    """
    mesh._thread_id = -world


class Chunks(Sequence[Tensor]):
    """The shards of a tensor over ``num_chunks`` ranks, as FSDP2 cuts it: each is made when it is asked for.

    FSDP2 makes a tensor for every rank and takes those of two, which at thousands of ranks takes minutes in a trace.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rank: int) -> Tensor: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Tensor]: ...

    def __getitem__(self, rank: int | slice) -> Tensor | list[Tensor]:
        """The rank's part, as ``torch.chunk`` gives it; past the tensor's end a tensor of no elements."""
        numbers = range(self._count)[rank]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        size = self._tensor.size(self._dim)
        length = -(-size // self._count)
        start = numbers * length
        if size and start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(length, size - start))


@cache
def give_collectives_shapes() -> None:
    """Collectives of tensors without bytes, which torch has from 2.11 on: each gives its tensors, and a finished work.

    The second call does nothing. It lasts as long as the process.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):
        return
    library = torch.library.Library("c10d", "IMPL", "Meta")
    _kept.append(library)
    for name in torch._C._dispatch_get_all_op_names():
        packet = name.removeprefix("c10d::")
        if name.startswith("c10d::") and "." not in packet:
            library.impl(packet, _collective(getattr(torch.ops.c10d, packet).default))


def _collective(operator: Any) -> Any:
    arguments = [argument.name for argument in operator._schema.arguments]
    returned = len(operator._schema.returns)

    def run(*args: Any) -> Any:
        given = dict(zip(arguments, args, strict=False))
        group = unboxed_group(given["process_group"])
        backend: Any = group._get_backend(torch.device("cpu"))
        work = backend.barrier(torch.distributed.BarrierOptions()).boxed()
        return (None, work, (args[0], work))[returned]

    return run


def served_store(host: str, listener: socket.socket, timeout: timedelta) -> torch.distributed.TCPStore:
    """A store that this process serves on a socket that listens already, which becomes the store's.

    The server over libuv takes no such socket before torch 2.8; the older server does.
    """
    backend = {"use_libuv": False} if release_number(torch.__version__) < (2, 8) else {}
    port = listener.getsockname()[1]
    return torch.distributed.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach(),
        **backend,
    )  # fmt: skip


@cache
def complete_cpu_streams() -> None:
    """Streams of the CPU, which do nothing, have the methods that FSDP2 calls, as from torch 2.7 on."""
    for name in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda self, event=None: None)


def forget_sharding() -> None:
    """Empties DTensor's caches of how operators are sharded: their meshes hold the groups of the rank that filled them,
    and are equal to those of another rank."""
    from torch.distributed.tensor import DTensor, _redistribute

    _redistribute._gen_transform_infos.cache_clear()
    propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    (propagate if hasattr(propagate, "cache_clear") else propagate.cache).cache_clear()  # the second: torch 2.8
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # from torch 2.10 on, a second cache in C++
        torch._C._clear_DTensor_sharding_propagator_cache()


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for a module; before torch 2.11 there is one at most."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def begin_fsdp_forward(net: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """FSDP2 does what it does before a sharded module's forward.

    Args:
        net: the outermost sharded module that holds it, or itself: FSDP2's root.
        args, kwargs: what is called with the module's parameters.

    Returns:
        The arguments to call it with, as a pair.
    """
    net._get_fsdp_state()._lazy_init()
    return module._get_fsdp_state()._pre_forward(module, args, kwargs)


def end_fsdp_forward(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """FSDP2 does what it does after a sharded module's forward; gives the output."""
    return module._get_fsdp_state()._post_forward(module, args, output)


def sum_gradients(module: Any) -> None:
    """FSDP2 sums a module's gradients over the ranks, and divides them by nothing."""
    if hasattr(module, "set_gradient_divide_factor"):  # from torch 2.8 on
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    else:
        _divide_by_one()


@cache
def _divide_by_one() -> None:
    """torch before 2.8 sums only where FSDP2 divides before and after, as for fp16; else it takes the mean.

    The second call does nothing. It lasts as long as the process.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    collectives: Any = _fsdp_collectives
    collectives._get_gradient_divide_factors = lambda *args, **kwargs: (1.0, 1.0)


_kept: list[Any] = []


def methods_of(owner: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of ``names`` that this version's class defines, as they stand in it."""
    return {name: vars(owner)[name] for name in names if name in vars(owner)}


__all__ = [
    "CHUNKS",
    "DISTRIBUTE_REGION",
    "FSDP_PARAMETER",
    "MAKE_GATHERED",
    "MESH_ARITHMETIC",
    "SHAPE_PROPAGATION",
    "Chunks",
    "DeviceMesh",
    "FakeStore",
    "OffsetBasedRNGTracker",
    "ShardingPropagator",
    "begin_fsdp_forward",
    "ddp",
    "distributed_c10d",
    "end_fsdp_forward",
    "forget_sharding",
    "fsdp_groups",
    "fsdp_param",
    "give_collectives_shapes",
    "methods_of",
    "sum_gradients",
]  # fmt: skip
