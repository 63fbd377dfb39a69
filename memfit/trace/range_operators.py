"""Follows between which numbers integers lie: positions along a dimension, truth values as numbers, random integers.

What is known of a tensor is in ``memfit.device.virtual.integer_ranges``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.integer_ranges import INTEGERS, IntegerRange, note_range
from memfit.device.virtual.value_masks import tensor_version
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.trace.constant_values import value_of
from memfit.trace.padding_masks import (
    COMPUTES,
    keep_computed,
    keeps_rows,
    known_range,
    note_computed,
    note_cumulative_sum,
    note_masked,
    note_padding_mask,
)

_aten = torch.ops.aten
_MUL = _aten.mul.Tensor
_OPERANDS = 2

Follow = Callable[[Any, Any, Any], None]
"""Notes what is known of an operator's output: operator, arguments, output."""


def _position(func: Any, args: Any, out: Any) -> None:
    """``argmax(dim)``, whose output is a position along the dimension."""
    note_computed(func, args, out)
    if len(args) > 1 and args[1] is not None and args[0].dim():
        _note(out, 0, args[0].shape[args[1]] - 1)


def _positions_beside(dim_at: int, default: int | None = None) -> Follow:
    """``max(dim)``, whose second output are positions along the dimension, the argument at ``dim_at``."""

    def follow(func: Any, args: Any, out: Any) -> None:
        dim = args[dim_at] if len(args) > dim_at else default
        note_computed(func, args, out[1])
        if dim is not None and args[0].dim():
            _note(out[1], 0, args[0].shape[dim] - 1)

    return follow


def _drawn(func: Any, args: Any, out: Any) -> None:
    """``multinomial``, which draws positions in the last dimension."""
    _note(out, 0, args[0].shape[-1] - 1)


def _random(func: Any, args: Any, out: Any) -> None:
    """``randint(low, high, size)``; ``low`` may be left out."""
    low, high = args[:2] if isinstance(args[1], int) else (0, args[0])
    _note(out, low, high - 1)


def _counted(func: Any, args: Any, out: Any) -> None:
    """``arange(end)``, ``arange(start, end)`` or ``arange(start, end, step)``."""
    first = 0 if func is _aten.arange.default else args[0]
    step = args[2] if len(args) > 2 else 1
    if out.dtype in INTEGERS and out.numel() and isinstance(first, int) and isinstance(step, int):
        last = first + step * (out.numel() - 1)
        _note(out, min(first, last), max(first, last), is_attained=True)


def _shifted(func: Any, args: Any, out: Any) -> None:
    """Counted integers with a number, such as positions from an offset on, or with a mask."""
    note_computed(func, args, out)
    if len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim():
        if func is _MUL:
            note_masked(func, args, out)
        return
    between = known_range(args[0])
    if between is None or not between.is_attained or len(args) < _OPERANDS or not isinstance(args[1], int):
        return
    if func is _MUL:
        _scale(out, between, args[1])
    else:
        by = args[1] if func is _aten.add.Tensor else -args[1]
        note_range(out, between.with_bounds(between.least + by, between.largest + by))


def _scale(out: Any, between: IntegerRange, by: int) -> None:
    if by > 0:
        note_range(out, between.with_bounds(by * between.least, by * between.largest))
    elif between.has_least and between.has_largest:
        _note(out, by * between.largest, by * between.least, is_attained=True)


def _kept(func: Any, args: Any, out: Any) -> None:
    """What holds elements of its first argument alone."""
    if isinstance(out, FakeTensor):
        _keep(func, args, out, version=0)


def _view(func: Any, args: Any, out: Any) -> None:
    for made in out if isinstance(out, list | tuple) else (out,):
        if isinstance(made, FakeTensor) and made.dtype == args[0].dtype:
            _keep(func, args, made, version=None)


def _keep(func: Any, args: Any, made: FakeTensor, *, version: int | None) -> None:
    """Notes what is known of elements that a tensor has of an operator's first argument.

    Args:
        version: None: that of the argument, of which it is a view.
    """
    keep_computed(args[0], made)
    between = known_range(args[0])
    if between is None or (made.dtype not in INTEGERS and not between.is_attained):
        return
    has_row_of_ones = between.has_row_of_ones and keeps_rows(func, args, made)
    if not (func in _KEEP_ALL or (func in _PARTS and made.numel() == args[0].numel())):
        is_alike = between.least == between.largest and made.numel() > 0
        between = replace(between, has_least=is_alike, has_largest=is_alike or has_row_of_ones)
    between = replace(between, has_row_of_ones=has_row_of_ones)
    note_range(made, between, tensor_version(args[0]) if version is None else version)


def _joined(func: Any, args: Any, out: Any) -> None:
    """What holds elements of all its arguments, some of which may be known."""
    for part in tensors_in(args):
        keep_computed(part, out)
    parts = [_range(part) for part in tensors_in(args)]
    known = [part for part in parts if part is not None]
    if known and len(known) == len(parts) and out.dtype in INTEGERS:
        least, largest = min(part.least for part in known), max(part.largest for part in known)
        has_least = any(part.has_least and part.least == least for part in known)
        has_largest = any(part.has_largest and part.largest == largest for part in known)
        note_range(out, IntegerRange(least=least, largest=largest, has_least=has_least, has_largest=has_largest))


def _range(tensor: Tensor) -> IntegerRange | None:
    between, value = known_range(tensor), value_of(tensor)
    if between is not None or value is None or value.dtype not in INTEGERS or not value.numel():
        return between
    with disable_current_modes():
        return IntegerRange(least=int(value.min()), largest=int(value.max()))


def _note(out: Any, least: int, largest: int, *, is_attained: bool = False) -> None:
    if isinstance(out, FakeTensor):
        note_range(out, IntegerRange(least=least, largest=largest, has_least=is_attained, has_largest=is_attained))


_KEEP_ALL = frozenset(
    {
        _aten._to_copy.default, _aten.clone.default, _aten.view.default, _aten._unsafe_view.default,
        _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default,
        _aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.alias.default, _aten.detach.default,
        _aten.repeat.default,
    }
)  # fmt: skip
"""Operators whose output holds every element of their first argument."""
_PARTS = frozenset(
    {_aten.slice.Tensor, _aten.select.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int}
)
"""Operators whose output holds every element of their first argument where it has as many."""
_FOLLOWED: dict[Any, Follow] = {
    **dict.fromkeys(COMPUTES, note_computed),
    _aten.ne.Scalar: note_padding_mask, _aten.cumsum.default: note_cumulative_sum,
    _aten.arange.default: _counted, _aten.arange.start: _counted, _aten.arange.start_step: _counted,
    _aten.add.Tensor: _shifted, _aten.sub.Tensor: _shifted, _MUL: _shifted, _aten.repeat.default: _kept,
    _aten.argmax.default: _position, _aten.argmin.default: _position,
    _aten.max.dim: _positions_beside(1), _aten.min.dim: _positions_beside(1), _aten.median.dim: _positions_beside(1),
    _aten.mode.default: _positions_beside(1, -1), _aten.kthvalue.default: _positions_beside(2, -1),
    _aten.topk.default: _positions_beside(2, -1), _aten.sort.default: _positions_beside(1, -1),
    _aten.multinomial.default: _drawn,
    _aten.randint.default: _random, _aten.randint.low: _random,
    _aten.randint.generator: _random, _aten.randint.low_generator: _random,
    _aten._to_copy.default: _kept, _aten.clone.default: _kept, _aten.index.Tensor: _kept,
    _aten.index_select.default: _kept, _aten.gather.default: _kept, _aten.masked_select.default: _kept,
    _aten.cat.default: _joined, _aten.stack.default: _joined,
}  # fmt: skip


def follows(func: Any) -> Follow | None:
    """What notes between which numbers an operator's output lies; None for one of which nothing is known."""
    return _FOLLOWED.get(func) or (_view if getattr(func, "is_view", False) else None)
