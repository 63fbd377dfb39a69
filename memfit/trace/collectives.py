"""What communication between ranks holds: which arguments of its operators are buffers, parameters or gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memfit.events import OVER
from memfit.torch_compat.attributes import schema_of
from memfit.torch_compat.distributed import group_words

HOLDS = {
    "fsdp::all_gather_copy_in": ("all_gather_output", "communication"),
    "fsdp::split_with_sizes_copy": ("out", "parameters"),
    "fsdp::chunk_cat": ("out", "communication"),
}
"""FSDP2's operators, by name: an argument, and what its storage holds. Shards are gathered into one buffer and copied
out of it to the parameters; gradients are copied into one buffer and scattered out of it."""


_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of torch's operators that wait for other ranks."""


def is_collective(func: Any) -> bool:
    """Whether an operator waits for other ranks, so that it cannot be run by itself."""
    return func.namespace in _NAMESPACES


def collective_name(func: Any, args: Any, kwargs: Any) -> str:
    """The operator's name and the dimension of the mesh whose ranks it joins, ``all_reduce over tp``; the name alone
    where it does not say its group.
    """
    names = [argument.name for argument in schema_of(func).arguments]
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
