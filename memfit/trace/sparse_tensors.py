"""Sparse tensors (COO) of a trace: gradients of ``nn.Embedding(sparse=True)``, what optimizers do with them, and
products with a graph's adjacency.

A fake tensor of sparse layout holds nothing. Its indices (sparse dimensions, entries) and values (entries, dense
dimensions) are tensors of their own beside it, and operators on it are made of those that torch's kernels allocate for
(aten/src/ATen/native/sparse/SparseTensor.cpp, SparseTensorMath.cpp, cuda/SparseCUDATensor.cu and
cuda/SparseCUDATensorMath.cu). How many entries differ follows from the indices where their content is known; else all
of them do, as many as there are rows at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.virtual_device import Virtual
from memfit.torch_compat import FakeTensor, current_autograd_node, disable_current_modes
from memfit.torch_compat.attributes import SPARSE_PARTS
from memfit.trace.constant_values import know, value_of
from memfit.trace.sparse_parts import Parts, SparseKernels, parts_of, seen_sparse, without_rule

NOT_SPARSE: Any = object()
"""What ``answer_sparse`` returns for a call without sparse tensors of a trace."""

_aten = torch.ops.aten
_CREATE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_CREATES = {
    _CREATE, _aten.sparse_compressed_tensor.comp_plain_value_size, _aten._sparse_compressed_tensor_with_dims.default,
    *(
        getattr(_aten, name).default
        for name in ("_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe", "_sparse_csc_tensor_unsafe")
    ),
}  # fmt: skip
"""Operators that make a sparse tensor. Those of compressed layouts have no rule."""
_BAG_BACKWARD = _aten._embedding_bag_backward.default
_TO_COPY = _aten._to_copy.default
MAY_BE_SPARSE = frozenset({*_CREATES, _BAG_BACKWARD, _TO_COPY})
"""Operators that ``takes_sparse`` knows."""
_IS_SPARSE = 9
"""Which argument of the backward of ``nn.EmbeddingBag`` says that its gradient is sparse."""
_MEAN = 1
_ACCUMULATES = "AccumulateGrad"


def takes_sparse(func: Any, args: Any) -> bool:
    """Whether ``answer_sparse`` may have something to say about a call."""
    if func in _CREATES or (func is _BAG_BACKWARD and args[_IS_SPARSE]):
        return True
    if func is _TO_COPY and args[0].layout in _COMPRESSED | {torch.sparse_coo}:
        return True
    return bool(seen_sparse) and any(map(_holds_sparse, args))


def _holds_sparse(value: Any) -> bool:
    return any(map(_holds_sparse, value)) if isinstance(value, list | tuple) else _is_sparse(value)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def answer_sparse(virtual: Virtual, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator on sparse tensors, whose allocations are those of the operators it is made of; else
    NOT_SPARSE. For use in a dispatch mode, which sees them where this is called with it.

    Raises:
        InputError: no rule says what the operator allocates.
    """
    name = func.name().removeprefix("aten::")
    moves = func is _TO_COPY and kwargs.get("device") not in (None, args[0].device)
    if not moves and not any(isinstance(value, FakeTensor) for value in _flat(args)):
        return NOT_SPARSE  # real tensors on the host
    if name.startswith("_foreach_"):
        return _one_by_one(func, args, kwargs)
    handler = _HANDLERS.get(name)
    answered = NOT_SPARSE if handler is None else handler(SparseKernels(virtual), *args, **kwargs)
    if answered is NOT_SPARSE:
        raise without_rule(f"{func.name()} of a sparse tensor")
    return answered


def _flat(values: Any) -> list[Any]:
    return [part for value in values for part in (value if isinstance(value, list | tuple) else (value,))]


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on lists, which torch calls for each of their elements where they are sparse."""
    name = func.name().removeprefix("aten::_foreach_").partition(".")[0]
    lists = [value for value in args if isinstance(value, list | tuple)]
    rest = [value for value in args if not isinstance(value, list | tuple)]
    outs = [getattr(_aten, name)(*each, *rest, **kwargs) for each in zip(*lists, strict=True)]
    return None if name.endswith("_") else outs


def _create(
    sparse: SparseKernels, sparse_dim: int, dense_dim: int, size: Any, indices: Tensor, values: Tensor, *,
    is_coalesced: bool | None = None, dtype: torch.dtype | None = None, **options: Any,
) -> Any:  # fmt: skip
    entries = min(indices.shape[1], values.shape[0])  # a mask whose content is known selects fewer
    return sparse.make(Parts(indices, values[:entries], bool(is_coalesced)), size)


def _bag_backward(
    sparse: SparseKernels, grad: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, bag_size: Tensor,
    maximum: Tensor, rows: int, by_frequency: bool, mode: int, is_sparse: bool, weights: Tensor | None,
    padding: int = -1,
) -> Tensor:  # fmt: skip
    """The gradient of each index is that of its bag (ATen/native/EmbeddingBag.cpp)."""
    entries = indices.shape[0]
    if bags.numel() == 0 or (grad.device.type == "cpu" and mode != _MEAN):  # not made in the forward
        counts = indices.new_empty((entries + 1,), dtype=torch.int64)
        bags = torch.empty_like(counts)
        del counts
    values = grad.new_empty((entries, grad.shape[1]))
    if mode == _MEAN:
        inverse = grad.new_empty((2, *bag_size.shape))
        of_entries = grad.new_empty((entries, 1))
        del inverse, of_entries
    if padding != -1:
        kept = indices != padding
        indices, values = indices[kept], values[kept]
    places = indices.reshape(1, -1).to(torch.int64)
    return sparse.make(Parts(places, values), (rows, grad.shape[1]))


def _with_parts(sparse: SparseKernels, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
    return sparse.make(parts_of(tensor), tensor.shape)


def _clone(sparse: SparseKernels, tensor: Tensor, **named: Any) -> Tensor:
    """A copy; autograd keeps a gradient that nothing else holds as it is, but for what it sees of it in a trace
    (torch/csrc/autograd/functions/accumulate_grad.h)."""
    parts, node = parts_of(tensor), current_autograd_node()
    taken = node is not None and node.name().endswith(_ACCUMULATES)
    if taken and parts.indices.is_contiguous() and parts.values.is_contiguous():
        return sparse.make(parts, tensor.shape)
    values = torch.empty_like(parts.values)
    return sparse.make(Parts(parts.indices.clone(), values, parts.is_coalesced), tensor.shape)


def _to_copy(sparse: SparseKernels, tensor: Tensor, **named: Any) -> Any:
    if not _is_sparse(tensor):
        return NOT_SPARSE
    given = {name: value for name, value in named.items() if name not in ("layout", "memory_format", "pin_memory")}
    parts = parts_of(tensor)
    values = _aten._to_copy.default(parts.values, **given)
    given.pop("dtype", None)
    return sparse.make(Parts(_aten._to_copy.default(parts.indices, **given), values, parts.is_coalesced), tensor.shape)


def _coalesce(sparse: SparseKernels, tensor: Tensor) -> Tensor:
    return sparse.make(sparse.coalesced(tensor), tensor.shape)


def _set_coalesced(sparse: SparseKernels, tensor: Tensor, coalesced: bool) -> Tensor:
    parts = parts_of(tensor)
    setattr(tensor, SPARSE_PARTS, Parts(parts.indices, parts.values, coalesced))
    return tensor


def _sum(sparse: SparseKernels, first: Tensor, second: Tensor, alpha: Any) -> Parts:
    """The parts of a sum of two sparse tensors: the entries of both."""
    own, other = parts_of(first), parts_of(second)
    added = other.values if alpha == 1 or other.values.device.type == "cpu" else other.values * alpha
    both = own.is_coalesced and other.is_coalesced and added.device.type == "cpu"
    indices = torch.cat((own.indices, other.indices), 1)
    values = torch.cat((own.values, added), 0)
    entries = sparse.different(indices, first.shape) if both else indices.shape[1]
    parts = Parts(indices[:, :entries], values[:entries], both)
    is_larger = values.device.type != "cpu" and values.numel() > first.numel()
    return sparse.coalesce(parts, first.shape) if is_larger else parts


def _add(sparse: SparseKernels, first: Tensor, second: Any, *, alpha: Any = 1) -> Any:
    if _is_sparse(first) and _is_sparse(second):
        return sparse.make(_sum(sparse, first, second, alpha), first.shape)
    return NOT_SPARSE if _is_sparse(first) else _add_(sparse, torch.empty_like(first), second, alpha=alpha)


def _add_(sparse: SparseKernels, first: Tensor, second: Any, *, alpha: Any = 1) -> Any:
    if not _is_sparse(second):
        return NOT_SPARSE
    if _is_sparse(first):
        setattr(first, SPARSE_PARTS, _sum(sparse, first, second, alpha))
        if current_autograd_node() is None:
            sparse.note_growth()
        return first
    values = parts_of(second).values.to(first.dtype)
    if values.device.type != "cpu":
        values = values.contiguous()
    del values
    return first


def _times(sparse: SparseKernels, tensor: Any, factor: Any, *rest: Any, **named: Any) -> Any:
    if not _is_sparse(tensor) or (isinstance(factor, Tensor) and factor.dim()):
        return NOT_SPARSE
    parts = parts_of(tensor)
    return sparse.make(Parts(parts.indices.clone(), torch.empty_like(parts.values), parts.is_coalesced), tensor.shape)


def _in_place(sparse: SparseKernels, tensor: Any, *rest: Any, **named: Any) -> Any:
    return (
        tensor
        if _is_sparse(tensor) and not any(isinstance(value, Tensor) and value.dim() for value in rest)
        else NOT_SPARSE
    )


def _zero_(sparse: SparseKernels, tensor: Tensor) -> Tensor:
    """No entries are left."""
    parts = parts_of(tensor)
    setattr(tensor, SPARSE_PARTS, Parts(parts.indices[:, :0].clone(), parts.values[:0].clone(), True))
    return tensor


def _empty(sparse: SparseKernels, tensor: Tensor, **named: Any) -> Any:
    if named.get("layout") not in (None, torch.sparse_coo):
        return NOT_SPARSE
    parts = parts_of(tensor)
    empty = Parts(parts.indices.new_empty((parts.indices.shape[0], 0)), parts.values[:0].clone(), True)
    return sparse.make(empty, tensor.shape)


def _mask(sparse: SparseKernels, dense: Tensor, mask: Tensor) -> Any:
    """The elements of a dense tensor where a sparse one has entries, times ones."""
    if _is_sparse(dense) or not _is_sparse(mask):
        return NOT_SPARSE
    parts = parts_of(mask)
    dims, entries = parts.indices.shape
    number = parts.values.new_empty((1,))
    gathered = dense.new_empty((entries, *dense.shape[dims:]))
    indices = parts.indices.clone()
    values = torch.empty_like(gathered)
    del gathered, number
    return sparse.make(Parts(indices, values, parts.is_coalesced), dense.shape)


def _to_dense(sparse: SparseKernels, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
    return parts_of(tensor).values.new_zeros(tensor.shape)


def _product(sparse: SparseKernels, first: Tensor, second: Tensor) -> Any:
    """A sparse tensor times a dense one, which is added to zeros."""
    zeros = second.new_zeros((first.shape[0], *second.shape[1:]))
    return _add_product(sparse, zeros, first, second)


def _add_product(sparse: SparseKernels, added: Tensor, first: Tensor, second: Tensor, **named: Any) -> Any:
    """A product of a sparse tensor and a dense one, added to a dense one. On a card, cuSPARSE takes indices as ends of
    rows and columns in 32 bits, and gives a result column by column; the buffer that it asks for is not known."""
    if not _is_sparse(first) or _is_sparse(second) or _is_sparse(added):
        return NOT_SPARSE
    made = second.new_empty((first.shape[0], *second.shape[1:]))
    if made.device.type == "cpu":
        return made
    parts = sparse.coalesced(first)
    entries = parts.indices.shape[1]
    ends = parts.indices.new_empty((first.shape[0] + 1,), dtype=torch.int32)
    rows = parts.indices.new_empty((entries,), dtype=torch.int32)
    del rows
    columns = torch.empty_like(parts.indices[0], dtype=torch.int32)
    turned = torch.empty_like(made)
    del ends, columns, turned
    return made


def _transpose(sparse: SparseKernels, tensor: Tensor, first: int = 0, second: int = 1) -> Any:
    """A copy with two sparse dimensions exchanged."""
    parts = parts_of(tensor)
    dims, size = parts.indices.shape[0], list(tensor.shape)
    first, second = first % len(size), second % len(size)
    if first >= dims or second >= dims:
        return NOT_SPARSE
    values, indices = torch.empty_like(parts.values), parts.indices.clone()
    row = torch.empty_like(indices[0])
    del row
    size[first], size[second] = size[second], size[first]
    known = value_of(indices)
    if known is not None:
        order = list(range(dims))
        order[first], order[second] = second, first
        with disable_current_modes():
            know(indices, known[order])
    return sparse.make(Parts(indices, values), size)


_HANDLERS: dict[str, Callable[..., Any]] = {
    "_sparse_coo_tensor_with_dims_and_tensors": _create,
    "_embedding_bag_backward": _bag_backward,
    "_indices": lambda sparse, tensor: parts_of(tensor).indices.view(parts_of(tensor).indices.shape),
    "_values": lambda sparse, tensor: parts_of(tensor).values.detach(),
    "_nnz": lambda sparse, tensor: parts_of(tensor).values.shape[0],
    "is_coalesced": lambda sparse, tensor: parts_of(tensor).is_coalesced,
    "_coalesce": _coalesce,
    "_coalesced_": _set_coalesced,
    "clone": _clone,
    "detach": _with_parts,
    "alias": _with_parts,
    "_to_copy": _to_copy,
    "add.Tensor": _add,
    "add_.Tensor": _add_,
    "sub.Tensor": _add,
    "sub_.Tensor": _add_,
    **dict.fromkeys(("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "neg"), _times),
    **dict.fromkeys(("mul_.Tensor", "mul_.Scalar", "div_.Tensor", "div_.Scalar", "neg_"), _in_place),
    "zero_": _zero_,
    "zeros_like": _empty,
    "empty_like": _empty,
    **dict.fromkeys(("mm", "mv"), _product),
    **dict.fromkeys(("addmm", "_sparse_addmm"), _add_product),
    **dict.fromkeys(("t", "transpose.int"), _transpose),
    "sparse_mask": _mask,
    "_to_dense": _to_dense,
}
_HANDLERS["indices"], _HANDLERS["values"] = _HANDLERS["_indices"], _HANDLERS["_values"]
"""By the name of an operator and its overload."""
