"""Autograd's sums of gradients, in place where a real run sums in place.

Where a tensor was used twice, autograd's engine adds the second gradient into the buffer of the first, if nobody else
holds that buffer (torch/csrc/autograd/input_buffer.cpp, ``accumulate`` and ``can_accumulate_inplace``). Under a
dispatch mode it never does, since it takes no subclass for plain: a trace shows an addition into new memory for every
residual connection. Here the engine's own conditions are put to the tensors that it would have had.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import disable_current_modes, is_dense, storage_use_count
from memfit.torch_compat.attributes import sequence_number_of, storage_id_of, use_count

_ADD = torch.ops.aten.add.Tensor
_HELD_BY_CALL = 4
"""use_count of a tensor that only the engine holds, seen from inside ``__torch_dispatch__`` of a fake tensor."""


@cache
def _held_by_call() -> tuple[int, int]:
    """(references to its Python object, uses of its storage) of such a tensor.

    The tuple of arguments and the question itself refer to the Python object, and in newer versions of torch C++ does,
    too, as long as it refers to the tensor. The tensor uses the storage, and in newer versions the storage's own Python
    object does, too. Both are counted here on a tensor that is known.
    """
    with disable_current_modes():
        tensor, holder = torch.empty(1), torch.empty(1)
        holder.grad = tensor
        return sys.getrefcount(tensor), storage_use_count(storage_id_of(tensor))


def made_in(node: Any, tensor: Tensor) -> None:
    """Notes the autograd node in whose backward an operator returned this tensor. Call it for every one."""
    tensor._memfit_node = sequence_number_of(node)  # type: ignore[attr-defined]


def sums_in_place(func: Any, args: Any, node: Any) -> bool:
    """Whether this call is the engine's sum of two gradients and a real run adds into the first of them.

    Args:
        func, args: what a dispatch mode was called with; its frame must hold no further reference to ``args[0]``.
        node: ``current_autograd_node()``.
    """
    if func is not _ADD or node is None or torch.is_grad_enabled() or len(args) != 2:
        return False
    return (
        isinstance(args[1], Tensor)
        and args[0].shape == args[1].shape
        and args[0].dtype is args[1].dtype
        and _only_the_engine_holds(args)
        and _is_a_sum_of_the_engine(args[0], node)
        and is_dense(args[0])
    )


def _only_the_engine_holds(args: Any) -> bool:
    references, uses = _held_by_call()
    return (
        sys.getrefcount(args[0]) <= references
        and use_count(args[0]) <= _HELD_BY_CALL
        and storage_use_count(storage_id_of(args[0])) <= uses
    )


def _is_a_sum_of_the_engine(first: Tensor, node: Any) -> bool:
    """A node's own formula adds what it made itself; the engine adds what an earlier node made, or two of its outputs
    that belong to the same input."""
    if getattr(first, "_memfit_node", None) != sequence_number_of(node):
        return True
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)
