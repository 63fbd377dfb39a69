"""Masks that say which elements of a batch are no padding, and their cumulative sums: positions of a sequence.

``(ids != padding).cumsum(1)`` numbers the elements of each item. The longest item of a batch has no padding, so that
its last number is the length. Only what a batch holds has padding: changes of a number from one element to the next,
``ids.diff() != 0``, begin segments, of which there may be few, and so do separators, ``ids == 3``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.integer_ranges import INTEGERS, IntegerRange, largest_whole, note_range, range_of, size_of
from memfit.device.virtual.value_masks import tensor_version
from memfit.torch_compat import FakeTensor
from memfit.trace.constant_values import value_of
from memfit.trace.filled_tensors import filled_number

ONES = IntegerRange(least=1, largest=1, has_least=True, has_largest=True, has_row_of_ones=True)
_PADDING_MASK = IntegerRange(least=0, largest=1, has_largest=True, has_row_of_ones=True)
_COMPUTED = "_memfit_computed"
"""Attribute of a tensor of integers that are no batch's, but were computed of others, or padded."""
_TRUTH_VALUES = 2

_aten = torch.ops.aten
COMPUTES = frozenset(
    {
        _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor,
        _aten.rsub.Scalar, _aten.neg.default, _aten.abs.default, _aten.sign.default, _aten.remainder.Scalar,
        _aten.remainder.Tensor, _aten.floor_divide.default, _aten.div.Tensor_mode, _aten.bitwise_and.Tensor,
        _aten.bitwise_and.Scalar, _aten.bitwise_or.Tensor, _aten.bitwise_xor.Tensor, _aten.bitwise_xor.Scalar,
        _aten.bitwise_right_shift.Tensor_Scalar, _aten.cumsum.default, _aten.sum.default, _aten.sum.dim_IntList,
        _aten.argmax.default, _aten.argmin.default, _aten.bucketize.Tensor, _aten.searchsorted.Tensor,
        _aten.constant_pad_nd.default, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.where.self,
        _aten.masked_scatter.default, _aten.scatter.value, _aten.scatter.src, _aten.index_put.default,
        _aten.index_fill.int_Scalar, _aten.index_copy.default, _aten.slice_scatter.default,
        _aten.select_scatter.default, _aten.tril.default, _aten.triu.default, _aten.clamp.default,
        _aten.clamp_min.default, _aten.minimum.default, _aten.maximum.default, _aten.full.default,
        _aten.full_like.default, _aten.new_full.default, _aten.zeros.default, _aten.zeros_like.default,
        _aten.new_zeros.default, _aten.ones.default, _aten.ones_like.default, _aten.new_ones.default,
    }
)  # fmt: skip
"""Operators whose integers are no batch's, or may be padding beside a batch's."""
_KEEPS_ROWS = frozenset(
    {
        _aten._to_copy.default, _aten.clone.default, _aten.view.default, _aten._unsafe_view.default,
        _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default,
        _aten.alias.default, _aten.detach.default,
    }
)  # fmt: skip
"""Operators that keep the last dimension where its size stays the same."""


def note_computed(func: Any, args: Any, out: Any) -> None:
    """Notes that integers are no batch's."""
    if isinstance(out, FakeTensor) and out.dtype in INTEGERS:
        setattr(out, _COMPUTED, True)


def keep_computed(source: Tensor, made: Tensor) -> None:
    """Notes the same of what holds elements of a tensor."""
    if made.dtype in INTEGERS and _is_computed(source):
        setattr(made, _COMPUTED, True)


def _is_computed(tensor: Tensor) -> bool:
    """Whether integers are no batch's; what was written to may be padded."""
    return _COMPUTED in tensor.__dict__ or tensor_version(tensor) > 0


def note_padding_mask(func: Any, args: Any, out: Any) -> None:
    """``ids != padding``, of a batch's integers that are not known."""
    tensor = args[0]
    if not isinstance(tensor, FakeTensor) or tensor.dtype not in INTEGERS or _is_computed(tensor):
        return
    if value_of(tensor) is not None:
        return
    between = range_of(tensor)
    if out.dim() > 1 and (between is None or (size_of(between) > _TRUTH_VALUES and not between.is_attained)):
        note_range(out, _PADDING_MASK)


def note_cumulative_sum(func: Any, args: Any, out: Any) -> None:
    """The sums of ones, and of masks along their last dimension."""
    note_computed(func, args, out)
    tensor, dim = args[:2]
    between = known_range(tensor)
    if between is None or not tensor.dim() or not out.numel():
        return
    length = min(tensor.shape[dim], largest_whole(out.dtype))  # of more, some element is so large
    if between.is_ones:
        note_range(out, IntegerRange(least=1, largest=length, has_least=True, has_largest=True))
    elif between.has_row_of_ones and dim % tensor.dim() == tensor.dim() - 1:
        note_range(out, IntegerRange(least=0, largest=length, has_largest=True))


def note_masked(func: Any, args: Any, out: Any) -> None:
    """Numbers with a mask: what is no padding keeps its number."""
    first, second = known_range(args[0]), known_range(args[1])
    if first is None or second is None:
        return
    for numbers, mask in ((first, second), (second, first)):
        if mask.is_ones:
            note_range(out, numbers)
            return
        if mask.has_row_of_ones and numbers.has_largest and numbers.largest > 0:
            note_range(out, IntegerRange(least=min(numbers.least, 0), largest=numbers.largest, has_largest=True))
            return


def keeps_rows(func: Any, args: Any, made: Tensor) -> bool:
    """Whether a row of ones in the last dimension is still one in what an operator makes of a mask."""
    source = args[0]
    if not source.dim() or not made.dim():
        return False
    if func is _aten.slice.Tensor:
        dim = args[1] if len(args) > 1 else 0
        return dim % source.dim() == source.dim() - 1 or made.shape == source.shape
    return func in _KEEPS_ROWS and made.shape[-1] == source.shape[-1]


def known_range(tensor: Any) -> IntegerRange | None:
    """Between which numbers a tensor's integers lie, be it by what it was filled with; None where that is not known."""
    between = range_of(tensor)
    is_noted = between is not None and (between.is_attained or tensor.dtype is not torch.bool)
    if not is_noted and isinstance(tensor, FakeTensor) and filled_number(tensor) == 1:
        return ONES
    return between
