"""Answers to questions that only data can answer: ``.item()``, ``if t > 0``, ``nonzero``, ``x[mask]`` …

A trace has no data. Where the answer changes no shape, a harmless value is given; where it is a size, the largest
one possible. Every answer is noted with the line of the user's code that asked, as an assumption of the prediction.
Works for fake tensors on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.assumptions import (
    ASSUMED_NUMBER,
    ASSUMED_TRUTH,
    Assumptions,
    assumed_number,
    assumed_truth,
    source_line,
)
from memfit.device.virtual.integer_ranges import most_different, range_of
from memfit.device.virtual.packed_sequences import packed
from memfit.errors import InputError
from memfit.torch_compat import FakeTensor, disable_current_modes

NOT_HANDLED: Any = object()
"""What ``answer`` returns for an operator that asks nothing of data."""

_aten = torch.ops.aten


def _item(assumptions: Assumptions, tensor: Tensor) -> Any:
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return NOT_HANDLED
    ends_loop = False
    if tensor.dtype is torch.bool:
        value: Any
        value, ends_loop = assumed_truth(tensor)
    else:
        value = complex(ASSUMED_NUMBER) if tensor.is_complex() else assumed_number(tensor)
    value = assumptions.answer(value, source_line()[0])
    assumptions.note("item", repr(value), doubtful=type(value) is int, ends_loop=ends_loop)
    return value


def _all_true(assumptions: Assumptions, tensor: Tensor) -> Tensor:
    """Answers True: torch asks whether the arguments of a distribution are valid."""
    assumptions.note("_is_all_true", "True")
    answered = torch.ones((), dtype=torch.bool, device=tensor.device)
    with disable_current_modes():
        answered.constant = torch.tensor(True)  # type: ignore[attr-defined]
    return answered


def _not_left_aligned(assumptions: Assumptions, tensor: Tensor, mask: Tensor) -> bool:
    """Whether nn.TransformerEncoder may leave padding out in evaluation: with it, as many elements are computed as a
    batch can have."""
    assumptions.note("_nested_tensor_from_mask_left_aligned", "False")
    return False


def _same(assumptions: Assumptions, first: Tensor, second: Tensor, *rest: Any, **named: Any) -> bool:
    """Tensors of one shape are the same. ATen asks this way too whether one truth value is true
    (``is_scalar_tensor_true``), as ``istft`` does whether its windows leave a gap."""
    same = first.shape == second.shape
    same = same and all(tensor.__dict__.get(ASSUMED_TRUTH, True) for tensor in (first, second))
    assumptions.note("equal", repr(same))
    return same


def _nonzero(assumptions: Assumptions, tensor: Tensor) -> Tensor:
    return tensor.new_empty((assumptions.count("nonzero", tensor), tensor.dim()), dtype=torch.int64)


def _masked_select(assumptions: Assumptions, tensor: Tensor, mask: Tensor) -> Tensor:
    """Every element is selected or an equal share. On a card, the mask first becomes indices, as in ``x[mask]`` (ATen's
    ``masked_select_out_cuda_impl``)."""
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    most = assumptions.count("masked_select", mask.expand(shape))
    if tensor.device.type == "cpu":
        return mask.new_empty((most,), dtype=tensor.dtype)  # the tensor may be real: positions, which a script made
    positions = mask.new_empty((most, max(len(shape), 1)), dtype=torch.int64)
    selected: Tensor = _aten.index.Tensor(tensor.expand(shape or (1,)), list(positions.unbind(1)))
    return selected


def _index(assumptions: Assumptions, tensor: Tensor, indices: Any) -> Any:
    """x[mask]: every element is selected, or an equal share. As in a real run, the mask first becomes indices."""
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8, torch.int8) for i in indices):
        return NOT_HANDLED
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8, torch.int8):
            positions.append(index)
        else:
            count = assumptions.count("index by a mask", index)
            positions_of_mask = index.new_empty((count, index.dim()), dtype=torch.int64)
            positions.extend(positions_of_mask.unbind(1))
    return _aten.index.Tensor(tensor, positions)


PUTS = (
    _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default,
    _aten._unsafe_index_put.default,
)  # fmt: skip
"""Operators that write values to where their indices say."""
_MASKS = (torch.bool, torch.uint8)


def fills_by_mask(tensor: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *rest: Any) -> bool:
    """Whether a put is ``masked_fill_``, which makes no indices: one number, ``x[mask] = 0`` (canDispatchToMaskedFill,
    ATen/native/TensorAdvancedIndexing.cpp). A number that a script wrote is on the CPU there; on the virtual card, a
    tensor of one element is taken for one."""
    given = [index for index in indices if index is not None]
    return len(given) == 1 and given[0].dtype in _MASKS and values.numel() == 1 and not accumulate


def _put(
    put: Callable[..., Any], assumptions: Assumptions, tensor: Tensor, indices: Any, values: Tensor,
    accumulate: bool = False, *rest: Any,
) -> Any:  # fmt: skip
    """``x[mask] = values``: as in a real run, the mask first becomes integer indices. The values say how many rows it
    selects; where they are the same for each, it is every one."""
    masks = [index for index in indices if index is not None and index.dtype in _MASKS]
    if not masks or fills_by_mask(tensor, indices, values, accumulate):
        return NOT_HANDLED
    rows = values.shape[0] if values.dim() and values.shape[0] != 1 else None
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            positions.append(index)
            continue
        selected = assumptions.count("index by a mask", index) if rows is None else rows
        positions.extend(index.new_empty((selected, index.dim()), dtype=torch.int64).unbind(1))
    return put(tensor, positions, values, accumulate, *rest)


def _unique(assumptions: Assumptions, tensor: Tensor, *flags: bool, **named: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As many different values as elements, or as numbers that they lie between, with the inverse and the counts where
    they are asked for."""
    different = most_different(tensor)
    assumptions.note("unique", f"all {different}", most=different)
    inverse = named.get("return_inverse", flags[1] if len(flags) > 1 else False)
    counts = named.get("return_counts", flags[2] if len(flags) > 2 else False)
    places = tensor.new_empty(tensor.shape if inverse else (0,), dtype=torch.int64)
    times = tensor.new_empty((different if counts else 0,), dtype=torch.int64)
    return tensor.new_empty((different,)), places, times


def _unique_along(assumptions: Assumptions, tensor: Tensor, dim: int | None, *flags: bool) -> tuple[Tensor, ...]:
    """As many different slices as the dimension is long; along none, as many values as elements.

    Args:
        flags: whether the inverse and the counts are asked for; the CPU's kernel gives both along a dimension.
    """
    inverse, counts = (True, True) if dim is not None and tensor.device.type == "cpu" else flags
    length = tensor.numel() if dim is None else tensor.shape[dim]
    assumptions.note("unique", f"all {length}", most=length)
    values = tensor.new_empty((length,) if dim is None else tensor.shape)
    of_inverse = tensor.shape if dim is None else (length,)
    places = tensor.new_empty(of_inverse if inverse else (0,), dtype=torch.int64)
    times = tensor.new_empty((length if counts else 0,), dtype=torch.int64)
    return values, places, times


def _unique_consecutive(
    assumptions: Assumptions, tensor: Tensor, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _unique_along(assumptions, tensor, dim, return_inverse, return_counts)


def _unique_dim_consecutive(
    assumptions: Assumptions, tensor: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, ...]:
    return _unique_along(assumptions, tensor, dim, return_inverse, return_counts)


def _unique_dim(
    assumptions: Assumptions, tensor: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _unique_along(assumptions, tensor, dim, return_inverse, return_counts)


def _bincount(assumptions: Assumptions, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As many counts as a person gave for the line, else as the numbers that are counted need at the most, or as the
    code asks for at the least."""
    between = range_of(tensor)
    least = max(minlength, between.largest + 1 if between is not None else 0)
    length = _given_size(assumptions, "bincount", least or None, "write minlength=N, the number of different values")
    dtype = torch.int64
    if weights is not None:
        dtype = weights.dtype if weights.dtype is torch.float32 else torch.float64
    return tensor.new_empty((length,), dtype=dtype)


def _repeat_interleave(assumptions: Assumptions, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Indices: as many as the code says itself, else as a person gave for the line."""
    if output_size is None:
        output_size = _given_size(assumptions, "repeat_interleave", None, "write output_size=N, the sum of the repeats")
    return repeats.new_empty((output_size,))


def _given_size(assumptions: Assumptions, operator: str, least: int | None, write: str) -> int:
    """The size that a person gave for the line that asks; else the least one, as an assumption that may be too low.

    Raises:
        InputError: neither is there.
    """
    where = source_line()[0]
    size = int(assumptions.answer(-1 if least is None else least, where))
    if size < 0:
        why = "the size of its result depends on data, which a trace does not have"
        raise InputError(f"{operator} at {where}", why, f"{write}, or give memfit trace --assume {where}=N")
    assumptions.note(operator, str(size), doubtful=True)
    return size


def _ctc_loss(
    assumptions: Assumptions, log_probs: Tensor, targets: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """(loss of each sample, alignments): the longest target is the targets' width, or all of them put together."""
    longest = targets.shape[-1]
    assumptions.note("ctc_loss", f"targets of {longest}")
    time, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    loss = log_probs.new_empty((batch,))
    return loss, log_probs.new_empty((batch, time, 2 * longest + 1))


def _ctc_loss_backward(assumptions: Assumptions, grad: Tensor, log_probs: Tensor, *rest: Any, **named: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _split(assumptions: Assumptions, tensor: Tensor, sizes: Any, dim: int = 0) -> Any:
    """Parts whose sizes were read from a tensor (experts, each with its tokens): equal ones."""
    length = tensor.shape[dim]
    if sum(sizes) == length or any(sizes):
        return NOT_HANDLED
    assumptions.note("split by sizes from data", f"{len(sizes)} equal parts of {length}")
    each, more = divmod(length, len(sizes))
    return _aten.split_with_sizes.default(tensor, [each + (i < more) for i in range(len(sizes))], dim)


def _packed(assumptions: Assumptions, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """(the rows of each step, concatenated; how many they are): every sequence is as long as the padded batch."""
    rows, steps = padded.shape[:2] if batch_first else padded.shape[1::-1]
    assumptions.note("pack_padded_sequence", f"all {rows * steps}", most=rows * steps)
    with disable_current_modes():
        sizes = torch.full((steps,), rows)
    return packed(padded, [rows] * steps, batch_first), sizes


def _refused(name: str) -> Callable[..., Any]:
    def refuse(assumptions: Assumptions, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"{name} at {source_line()[0]}",
            "the size of its result depends on data, which a trace does not have",
            "write this part of the job with sizes that follow from the batch's shape",
        )

    return refuse


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten._is_all_true.default: _all_true,
    _aten._nested_tensor_from_mask_left_aligned.default: _not_left_aligned,
    _aten._nested_tensor_from_mask.default: _refused("_nested_tensor_from_mask"),
    _aten.equal.default: _same,
    _aten.allclose.default: _same,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique,
    **{put: partial(_put, put) for put in PUTS},
    _aten.split_with_sizes.default: _split,
    _aten.unique_dim.default: _unique_dim,
    _aten.unique_dim_consecutive.default: _unique_dim_consecutive,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.bincount.default: _bincount,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    _aten._pack_padded_sequence.default: _packed,
}


def asks_data(func: Any) -> bool:
    """Whether ``answer`` may have something to say about this operator."""
    return func in _HANDLERS


def answer_operator(func: Any, args: Any, kwargs: Any, assumptions: Assumptions) -> Any:
    """The result of a data-dependent operator on fake tensors, or NOT_HANDLED. For use in a dispatch mode.

    Allocations inside (the indices of ``x[mask]``) are made under the modes that are active where this is called:
    call it ``with mode:`` to see them.

    Raises:
        InputError: an operator whose size cannot be bounded sensibly, or an endless loop; names the line.
    """
    handler = _HANDLERS.get(func)
    if handler is None or not _asks_a_fake(args):
        return NOT_HANDLED
    return handler(assumptions, *args, **kwargs)


def _asks_a_fake(args: Any) -> bool:
    """DeviceMesh and others ask real tensors, which have answers of their own."""
    return any(isinstance(arg, FakeTensor) or (isinstance(arg, list | tuple) and _asks_a_fake(arg)) for arg in args)
