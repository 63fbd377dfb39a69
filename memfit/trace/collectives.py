"""What communication between ranks holds: which arguments of its operators are buffers, parameters or gradients."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor

from memfit.events import OVER
from memfit.mesh import INSIDE, MeshShape
from memfit.torch_compat.attributes import schema_of
from memfit.torch_compat.distributed import group_words, unboxed_group

HOLDS = {
    "fsdp::all_gather_copy_in": ("all_gather_output", "communication"),
    "fsdp::split_with_sizes_copy": ("out", "parameters"),
    "fsdp::chunk_cat": ("out", "communication"),
}
"""FSDP2's operators, by name: an argument, and what its storage holds. Shards are gathered into one buffer and copied
out of it to the parameters; gradients are copied into one buffer and scattered out of it."""


IN_PLACE = {"c10d::allreduce_": "all_reduce"}
"""Collectives that give no new tensor, and what the functional ones of their kind are called. Those of data parallelism
are not of a trace's operators: they run beside the computation."""
_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of torch's operators that wait for other ranks."""


def is_collective(func: Any) -> bool:
    """Whether an operator waits for other ranks, so that it cannot be run by itself."""
    return func.namespace in _NAMESPACES


def layer_groups(mesh: MeshShape | None) -> frozenset[str]:
    """What torch calls the groups of ranks that wait for each other inside of layers; of a mesh of one dimension the
    group is the default one."""
    sizes = mesh.sizes() if mesh is not None else {}
    return frozenset(f"mesh_{name}" if len(sizes) > 1 else "default_pg" for name in INSIDE if name in sizes)


def collective_name(func: Any, args: Any, kwargs: Any, groups: Container[str]) -> str:
    """The operator's name and the dimension of the mesh whose ranks it joins, ``all_reduce over tp``; the name alone
    where it does not say its group.

    Args:
        groups: of ``layer_groups``, whose collectives in place are inside of layers.
    """
    names = [argument.name for argument in schema_of(func).arguments]
    if kind := IN_PLACE.get(schema_of(func).name):
        words = group_words(unboxed_group(args[names.index("process_group")]))
        return f"{kind}{OVER}{words.removeprefix('mesh_')}" if words in groups else str(func)
    if "group_name" not in names:
        return str(func)
    position = names.index("group_name")
    group = kwargs.get("group_name", args[position] if position < len(args) else None)
    return f"{str(func).split('.')[1]}{OVER}{group_words(group).removeprefix('mesh_')}"


def held(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, str]]:
    """(tensor, category) of the arguments of an operator in HOLDS."""
    wanted, category = HOLDS[schema_of(func).name]
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == wanted:
            value = kwargs.get(wanted, args[position] if position < len(args) else None)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                yield tensor, category
