"""Follows which elements of a mask belong to which value: ``(ids == 3).any(-1)``, ``one_hot(ids)[..., 3]``.

Where something is known of a tensor is in ``memfit.device.virtual.value_masks``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.integer_ranges import INTEGERS
from memfit.device.virtual.value_masks import ValueMask, integers_of, mask_of, note_mask, tensor_version
from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.trace.constant_values import know, value_of
from memfit.trace.filled_tensors import is_filled_with
from memfit.trace.value_counts import know_equal_counts

MOST_POSITIONS = 1 << 12
"""Elements of the largest tensor whose positions are known where all of them are taken for other than zero."""

_aten = torch.ops.aten
_SUM = _aten.sum.dim_IntList
_COPIES = frozenset({_aten._to_copy.default, _aten.clone.default})
NONZERO = _aten.nonzero.default

Follow = Callable[[Any, Any, Any], None]
"""Notes what is known of an operator's output: operator, arguments, output."""


def _equals_number(func: Any, args: Any, out: Any) -> None:
    """``ids == 3``."""
    tensor, number = args[:2]
    if mask_of(tensor) is not None:
        if number:
            _subset(func, args, out)
    elif _is_unknown(tensor) and not isinstance(number, complex) and number == int(number):
        with disable_current_modes():
            labels = torch.tensor(int(number)).expand(tuple(out.shape))
        note_mask(out, integers_of(tensor), labels, out.numel(), is_one_hot=True)


def _equals(func: Any, args: Any, out: Any) -> None:
    """``ids[:, None] == torch.arange(8)``: each value of the second is compared with each integer of the first."""
    for unknown, other in (args[:2], args[1::-1]):
        values = value_of(other) if isinstance(other, Tensor) else None
        if values is None or not _is_unknown(unknown) or not values.numel() or values.dtype not in INTEGERS:
            continue
        with disable_current_modes():
            outer = values.numel() == 1 or out.numel() == unknown.numel() * values.numel()
            if not outer or values.unique().numel() < values.numel():
                return
            labels = (values.long().flatten()[0] if values.numel() == 1 else values.long()).expand(tuple(out.shape))
        note_mask(out, integers_of(unknown), labels, out.numel() // values.numel(), is_one_hot=True)
        return


def _is_unknown(tensor: Any) -> bool:
    is_fake = isinstance(tensor, FakeTensor) and tensor.dtype in INTEGERS and tensor.numel() > 1
    return is_fake and value_of(tensor) is None and mask_of(tensor) is None


def _scatters(func: Any, args: Any, out: Any) -> None:
    """``zeros(tokens, experts).scatter_(1, ids, 1)``, with a number or with weights."""
    target, dim, ids = args[:3]
    if not isinstance(out, FakeTensor) or not is_filled_with(target, 0) or not _is_unknown(ids):
        return
    dim %= max(target.dim(), 1)
    with disable_current_modes():
        shape = [-1 if i == dim else 1 for i in range(target.dim())]
        labels = torch.arange(target.shape[dim]).view(shape).expand(tuple(target.shape))
    version = tensor_version(target) + 1 if out is target else 0
    ones = not isinstance(args[3], Tensor) and args[3] == 1
    note_mask(out, integers_of(ids), labels, ids.numel(), version, is_one_hot=ones)


def _above(func: Any, args: Any, out: Any) -> None:
    """``counts > 0``: what is zero stays out."""
    if mask_of(args[0]) is None:
        return
    with disable_current_modes():
        holds_of_zero = bool(func(torch.zeros(()), args[1]))
    if not holds_of_zero:
        _subset(func, args, out)


def _subset(func: Any, args: Any, out: Any) -> None:
    """What is other than zero only where an argument is."""
    if not isinstance(out, FakeTensor):
        return
    for argument in args[:2]:
        mask = mask_of(argument)
        if mask is not None:
            with disable_current_modes():
                labels = mask.labels.expand(tuple(out.shape))
            _note(out, mask, labels, is_one_hot=mask.is_one_hot and func in _COPIES)
            return


def _view(func: Any, args: Any, out: Any) -> None:
    mask = mask_of(args[0])
    if mask is None or any(isinstance(argument, Tensor) for argument in args[1:]):
        return
    labels: Any = None
    with disable_current_modes(), contextlib.suppress(RuntimeError):  # a view that labels of other strides have not
        labels = func(mask.labels, *args[1:])
    if labels is None:
        return
    outs, parts = (out, labels) if isinstance(out, list | tuple) else ([out], [labels])
    for made, part in zip(outs, parts, strict=True):
        if isinstance(made, FakeTensor) and made.numel():
            _note(made, mask, part, mask.version, is_one_hot=mask.is_one_hot)


def _row(func: Any, args: Any, out: Any) -> None:
    """``one_hot[tensor([3])]``."""
    mask, indices = mask_of(args[0]), [(i, index) for i, index in enumerate(args[1]) if index is not None]
    if mask is None or len(indices) != 1:
        return
    dim, index = indices[0]
    value = value_of(index)
    if value is None or value.numel() != 1 or value.dtype not in INTEGERS or value.dim() > 1:
        return
    with disable_current_modes():
        labels = mask.labels.select(dim, int(value))
        labels = labels.unsqueeze(dim) if value.dim() else labels
    _note(out, mask, labels, is_one_hot=mask.is_one_hot)


def _note(out: Tensor, mask: ValueMask, labels: Tensor, version: int = 0, *, is_one_hot: bool) -> None:
    """Notes a mask that has more or fewer elements for each value than the one that it is made of."""
    made = ValueMask(integers=mask.integers, labels=labels, most=mask.most, version=0)
    before, now = mask.labels.numel() // mask.values, out.numel() // made.values
    most = max(mask.most * now // max(before, 1), 1)
    note_mask(out, mask.integers, labels, most, version, is_one_hot=is_one_hot)


def _reduces(func: Any, args: Any, out: Any) -> None:
    """``mask.any(-1)``, ``one_hot.sum(0)``: along a dimension of one value, none is there that was not before. Where
    nothing but the values is left, a sum counts each of them."""
    mask = mask_of(args[0])
    if mask is None or not isinstance(out, FakeTensor) or len(args) < 2 or args[1] is None:
        return
    given = args[1] if isinstance(args[1], list | tuple) else [args[1]]
    labels = mask.labels
    dims = sorted({dim % labels.dim() for dim in given}, reverse=True)
    if any(labels.stride(dim) and labels.shape[dim] > 1 for dim in dims):
        return
    with disable_current_modes():
        for dim in dims:
            labels = labels.select(dim, 0)
        labels = labels.view(tuple(out.shape)) if labels.numel() == 1 else labels
        for dim in reversed(dims) if labels.dim() < out.dim() else ():
            labels = labels.unsqueeze(dim)
    is_one_hot = mask.is_one_hot and func is _SUM
    note_mask(out, mask.integers, labels, mask.most, is_one_hot=is_one_hot)
    if is_one_hot and out.dtype in INTEGERS and 1 < out.numel() == _distinct(labels):
        know_equal_counts(out, "sum of a mask of values", mask.most)


def _distinct(labels: Tensor) -> int:
    with disable_current_modes():
        return labels.unique().numel()


_FOLLOWED: dict[Any, Follow] = {
    _aten.eq.Scalar: _equals_number,
    _aten.eq.Tensor: _equals,
    _aten.scatter_.value: _scatters, _aten.scatter_.src: _scatters,
    _aten.scatter.value: _scatters, _aten.scatter.src: _scatters,
    _aten.gt.Scalar: _above, _aten.ge.Scalar: _above, _aten.ne.Scalar: _above,
    _aten._to_copy.default: _subset, _aten.clone.default: _subset, _aten.mul.Tensor: _subset,
    _aten.bitwise_and.Tensor: _subset, _aten.logical_and.default: _subset,
    _aten.index.Tensor: _row,
    _aten.any.dim: _reduces, _aten.any.dims: _reduces, _SUM: _reduces,
    _aten.amax.default: _reduces,
}  # fmt: skip


def follows(func: Any) -> Follow | None:
    """What notes whose masks an operator makes; None for one that makes none."""
    return _FOLLOWED.get(func) or (_view if getattr(func, "is_view", False) else None)


def know_positions(tensor: Tensor, positions: Any) -> None:
    """Notes where a small tensor is other than zero, if it is taken to be that everywhere: the experts with tokens."""
    count = tensor.numel()
    if isinstance(positions, FakeTensor) and 0 < count <= MOST_POSITIONS and positions.shape[0] == count:
        with disable_current_modes():
            know(positions, torch.ones(tuple(tensor.shape)).nonzero())
