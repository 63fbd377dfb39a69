"""How torch's operators pass on a dimension of which each tensor-parallel rank has a part.

Columns of a linear layer that are cut give each rank a part of the last dimension. Operators that compute each element,
each head or each token by itself give parts again; what mixes elements of several ranks does not (``MixedError``).
Shapes here are those of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memfit.engine.tensor_split import MixedError, Operation, Split

Rule = Callable[[Operation], Any]
"""What gives the split of an operator's output."""


def carried(operation: Operation, pointwise: bool) -> Any:
    """The split of an operator's output, or of each of several outputs; None where an output is whole.

    Args:
        pointwise: whether the operator computes each element by itself.

    Raises:
        MixedError: the operator mixes what ranks have, or memfit has no rule for it.
    """
    name = operation.name.rstrip("_") or operation.name
    rule = RULES.get(name.lstrip("_"))
    if name.startswith("_scaled_dot_product"):
        rule = _attention
    if rule is None and pointwise:
        rule = _pointwise
    if rule is None:
        raise MixedError(f"{operation.name} has no rule for parts of a tensor")
    return rule(operation)


def _pointwise(operation: Operation) -> Split | None:
    output = operation.output[0] if isinstance(operation.output, tuple | list) else operation.output
    operands = [each for each in (*operation.args, *operation.kwargs.values()) if isinstance(each, Tensor)]
    return _aligned(operation, operands, output.dim())


def _aligned(operation: Operation, operands: Sequence[Tensor], dims: int) -> Split | None:
    """The split of what tensors give that are broadcast to so many dimensions."""
    merged: Split | None = None
    for tensor in operands:
        split = operation.split_of(tensor)
        if split is not None:
            merged = _merged(operation, merged, replace(split, dim=split.dim + dims - tensor.dim()))
    if merged is None:
        return None
    for tensor in operands:
        if operation.split_of(tensor) is None:
            place = merged.dim - (dims - tensor.dim())
            if place >= 0 and tensor.shape[place] != 1:
                raise MixedError(f"{operation.name} takes parts of one tensor and another one whole")
            _check_learned(operation, tensor)
    return merged


def _check_learned(operation: Operation, whole: Tensor) -> None:
    if whole.requires_grad and not operation.sums_gradients:
        raise MixedError(f"{operation.name} takes parts, and a whole tensor whose gradient each rank has a part of")


def _merged(operation: Operation, first: Split | None, second: Split) -> Split:
    if first is None:
        return second
    if (first.dim, first.outer) != (second.dim, second.outer):
        raise MixedError(f"{operation.name} takes tensors that are cut along different dimensions")
    units = operation.shared_out(math.gcd(first.units, second.units))
    return replace(first, units=units, sources=first.sources | second.sources)


def _view(operation: Operation) -> Split:
    """A tensor in another shape: the split is where its units are."""
    tensor, split = _only(operation)
    before, after = list(tensor.shape), list(operation.output.shape)
    ahead = math.prod(before[: split.dim])
    place = 1
    for dim, size in enumerate(after):
        if place <= ahead * split.outer < place * size:
            return _within(operation, split, dim, size, ahead * split.outer, place)
        place *= size
    raise MixedError(f"{operation.name} mixes parts")


def _within(operation: Operation, split: Split, dim: int, size: int, ahead: int, place: int) -> Split:
    """The split along a dimension of a view, in which the units begin."""
    outer, rest = divmod(ahead, place)
    if rest or size % outer:
        raise MixedError(f"{operation.name} mixes parts")
    inside = size // outer
    if inside % split.units == 0:
        return replace(split, dim=dim, outer=outer)
    if split.units % inside == 0:
        return replace(split, dim=dim, outer=outer, units=operation.shared_out(inside, inside if outer == 1 else 0))
    raise MixedError(f"{operation.name} mixes parts")


def _only(operation: Operation) -> tuple[Tensor, Split]:
    """The first argument, which is split."""
    tensor = operation.args[0]
    split = operation.split_of(tensor) if isinstance(tensor, Tensor) else None
    if split is None:
        raise MixedError(f"{operation.name} takes parts beside its first argument")
    return tensor, split


def _permute(operation: Operation) -> Split:
    tensor, split = _only(operation)
    order = [dim % tensor.dim() for dim in operation.args[1]]
    return replace(split, dim=order.index(split.dim))


def _transpose(operation: Operation) -> Split:
    tensor, split = _only(operation)
    pair = (0, 1) if operation.name in ("t", "t_") else operation.args[1:3]
    first, second = (dim % tensor.dim() for dim in pair)
    return replace(split, dim={first: second, second: first}.get(split.dim, split.dim))


def _unsqueeze(operation: Operation) -> Split:
    tensor, split = _only(operation)
    dim = operation.args[1] % (tensor.dim() + 1)
    return replace(split, dim=split.dim + (dim <= split.dim))


def _squeeze(operation: Operation) -> Split:
    tensor, split = _only(operation)
    given = operation.args[1] if len(operation.args) > 1 else list(range(tensor.dim()))
    dims = {dim % tensor.dim() for dim in (given if isinstance(given, list | tuple) else [given])}
    return replace(split, dim=split.dim - sum(dim < split.dim and tensor.shape[dim] == 1 for dim in dims))


def _expand(operation: Operation) -> Split:
    tensor, split = _only(operation)
    dim = split.dim + operation.output.dim() - tensor.dim()
    if operation.output.shape[dim] != tensor.shape[split.dim]:
        raise MixedError(f"{operation.name} repeats parts")
    return replace(split, dim=dim)


def _repeat(operation: Operation) -> Split:
    tensor, split = _only(operation)
    dim = split.dim + operation.output.dim() - tensor.dim()
    if operation.args[1][dim] != 1:
        raise MixedError(f"{operation.name} repeats parts")
    return replace(split, dim=dim)


def _complex(operation: Operation) -> Split:
    """Pairs of real numbers, which are the last dimension, as complex ones, or the other way round."""
    tensor, split = _only(operation)
    if operation.name == "view_as_complex" and split.dim == tensor.dim() - 1:
        raise MixedError(f"{operation.name} mixes parts")
    return split


def _select_rows(operation: Operation) -> Split:
    """Elements along one dimension, which is not cut, by a tensor of indices that every rank has."""
    tensor, split = _only(operation)
    if operation.args[1] % tensor.dim() == split.dim or operation.split_of(operation.args[2]) is not None:
        raise MixedError(f"{operation.name} takes parts apart")
    return split


def _along(operation: Operation) -> Split:
    """An operator that mixes elements along the dimensions of its second argument alone, and keeps all dimensions."""
    tensor, split = _only(operation)
    given = operation.argument(1, "dim")
    dims = {dim % tensor.dim() for dim in (given if isinstance(given, list | tuple) else [given])}
    if split.dim in dims:
        raise MixedError(f"{operation.name} is over all parts together")
    return split


def _roll(operation: Operation) -> Split:
    tensor, split = _only(operation)
    dims = operation.argument(2, "dims") or ()
    if not dims or split.dim in {dim % tensor.dim() for dim in dims}:
        raise MixedError(f"{operation.name} moves parts")
    return split


def _reduce(operation: Operation) -> Split:
    """A sum, mean or norm along some dimensions, which the output may lack."""
    tensor, split = _only(operation)
    given = operation.argument(2 if operation.name == "linalg_vector_norm" else 1, "dim")
    dims = {dim % tensor.dim() for dim in (given if isinstance(given, list | tuple) else [given]) if dim is not None}
    if not dims or split.dim in dims:
        raise MixedError(f"{operation.name} is over all parts together")
    kept = operation.output.dim() == tensor.dim()
    return split if kept else replace(split, dim=split.dim - sum(dim < split.dim for dim in dims))


def _norm(operation: Operation) -> Any:
    """A layer norm or RMS norm over the last dimensions: the output and what its backward needs."""
    tensor, split = _only(operation)
    if split.dim >= tensor.dim() - len(operation.args[1]):
        raise MixedError(f"{operation.name} is over all parts together")
    for learned in operation.args[2:4]:
        if isinstance(learned, Tensor):
            _check_learned(operation, learned)
    return [split] * len(operation.output) if isinstance(operation.output, tuple | list) else split


def _pieces(operation: Operation) -> Any:
    """A tensor in pieces along a dimension: each piece has whole parts of a fused projection, or all units."""
    tensor, split = _only(operation)
    dim = operation.argument(2, "dim", 0) % tensor.dim()
    return [_piece(operation, split, tensor, dim, piece.shape[dim]) for piece in operation.output]


def _piece(operation: Operation, split: Split, tensor: Tensor, dim: int, length: int, start: int = 0) -> Split:
    size = tensor.shape[dim]
    if dim != split.dim or length == size:
        return split
    each = size // split.outer
    if length % each == 0 and start % each == 0:
        return replace(split, outer=length // each)
    raise MixedError(f"{operation.name} takes parts apart", size // length if size % length == 0 else 0)


def _slice(operation: Operation) -> Split:
    tensor, split = _only(operation)
    dim = operation.argument(1, "dim", 0) % tensor.dim()
    if operation.argument(4, "step", 1) != 1 and dim == split.dim:
        raise MixedError(f"{operation.name} takes parts apart")
    start = operation.argument(2, "start", 0) or 0
    size = tensor.shape[dim]
    return _piece(
        operation, split, tensor, dim, operation.output.shape[dim], min(start % size if start < 0 else start, size)
    )


def _select(operation: Operation) -> Split:
    tensor, split = _only(operation)
    dim = operation.argument(1, "dim", 0) % tensor.dim()
    if dim == split.dim:
        raise MixedError(f"{operation.name} takes one of the parts", tensor.shape[dim] if split.outer == 1 else 0)
    return replace(split, dim=split.dim - (dim < split.dim))


def _index(operation: Operation) -> Split:
    """Elements by tensors of indices, for neighbouring dimensions that are not cut."""
    tensor, split = _only(operation)
    given = [dim for dim, index in enumerate(operation.args[1]) if index is not None]
    indices = [operation.args[1][dim] for dim in given]
    if any(operation.split_of(index) is not None or index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise MixedError(f"{operation.name} takes elements by what ranks have parts of, or by a mask")
    if split.dim in given or given[-1] - given[0] != len(given) - 1:
        raise MixedError(f"{operation.name} takes parts apart")
    made = operation.output.dim() - (tensor.dim() - len(given))
    return replace(split, dim=split.dim + (made - len(given) if split.dim > given[0] else 0))


def _unbind(operation: Operation) -> Any:
    tensor, split = _only(operation)
    dim = operation.argument(1, "dim", 0) % tensor.dim()
    if dim == split.dim:
        raise MixedError(f"{operation.name} takes parts apart", tensor.shape[dim] if split.outer == 1 else 0)
    return [replace(split, dim=split.dim - (dim < split.dim))] * len(operation.output)


def _cat(operation: Operation) -> Split:
    tensors = [tensor for tensor in operation.args[0] if tuple(tensor.shape) != (0,)]
    dim, new = operation.argument(1, "dim", 0), operation.name == "stack"
    dim %= tensors[0].dim() + new
    merged: Split | None = None
    for tensor in tensors:
        split = operation.split_of(tensor)
        if split is None:
            raise MixedError(f"{operation.name} takes parts of one tensor and another one whole")
        merged = _merged(operation, merged, split)
    assert merged is not None
    if dim == merged.dim and not new:
        raise MixedError(f"{operation.name} is along the dimension that is cut")
    return replace(merged, dim=merged.dim + (new and dim <= merged.dim))


def _products(operation: Operation) -> Split:
    """Products of a batch of matrices, added to another tensor (``baddbmm``) or not."""
    first, second = operation.args[-2:]
    rows, columns = operation.split_of(first), operation.split_of(second)
    batches = [split for split in (rows, columns) if split is not None and split.dim == 0]
    if len(batches) == 2:
        split = _merged(operation, batches[0], batches[1])
    elif not batches and rows is not None and columns is None and rows.dim == 1:
        _check_learned(operation, second)
        split = rows
    elif not batches and rows is None and columns is not None and columns.dim == 2:
        _check_learned(operation, first)
        split = columns
    else:
        raise MixedError(f"{operation.name} sums over all parts together, or takes another tensor whole")
    added = operation.args[:-2]
    if added and operation.split_of(added[0]) is not None:
        return _merged(operation, split, _aligned(operation, added, 3) or split)
    for tensor in added:
        place = split.dim - (3 - tensor.dim())
        if place >= 0 and tensor.shape[place] != 1:
            raise MixedError(f"{operation.name} takes parts of one tensor and another one whole")
        _check_learned(operation, tensor)
    return split


def _attention(operation: Operation) -> Any:
    """Scaled dot-product attention: heads are the second dimension of each tensor."""
    tensors = [each for each in (*operation.args, *operation.kwargs.values()) if isinstance(each, Tensor)]
    merged: Split | None = None
    for tensor in tensors[:3]:
        split = operation.split_of(tensor)
        if split is None or split.dim != 1:
            raise MixedError("attention takes queries, keys and values that are not cut by heads alike")
        merged = _merged(operation, merged, split)
    assert merged is not None
    for bias in tensors[3:]:
        split = operation.split_of(bias)
        if split is not None:
            merged = _merged(operation, merged, split)
        elif bias.dim() == 4 and bias.shape[1] != 1:
            raise MixedError("attention takes a bias of all heads")
        else:
            _check_learned(operation, bias)
    outputs = operation.output if isinstance(operation.output, tuple | list) else [operation.output]
    return [merged if each.dim() > 2 else None for each in outputs if isinstance(each, Tensor)]


def _pad(operation: Operation) -> Split:
    tensor, split = _only(operation)
    from_last = tensor.dim() - 1 - split.dim
    if any(operation.args[1][2 * from_last : 2 * from_last + 2]):
        raise MixedError(f"{operation.name} pads the dimension that is cut")
    return split


def _dropout(operation: Operation) -> Any:
    return [_only(operation)[1]] * 2


def _likes(operation: Operation) -> Split:
    return _only(operation)[1]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("view", "unsafe_view", "reshape_alias", "reshape"), _view),
    **dict.fromkeys(("t", "transpose"), _transpose),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std", "linalg_vector_norm", "logsumexp"), _reduce),
    **dict.fromkeys(("softmax", "log_softmax", "safe_softmax", "cumsum", "flip"), _along),
    **dict.fromkeys(("native_layer_norm", "fused_rms_norm"), _norm),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _pieces),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("bmm", "baddbmm"), _products),
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "full_like"), _likes),
    **dict.fromkeys(
        ("clone", "detach", "alias", "to_copy", "masked_fill", "where", "bernoulli", "lift_fresh", "mul", "add"),
        _pointwise,
    ),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "view_as_complex": _complex,
    "view_as_real": _complex,
    "index_select": _select_rows,
    "roll": _roll,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    "index": _index,
    "native_dropout": _dropout,
    "constant_pad_nd": _pad,
}
"""By the name of an operator, without underlines at its beginning and end."""


def is_pointwise(func: Any) -> bool:
    """Whether an operator computes each element by itself, by torch's own tag."""
    return torch.Tag.pointwise in func.tags
