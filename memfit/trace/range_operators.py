"""Follows between which numbers integers lie: positions along a dimension, truth values as numbers, random integers.

What is known of a tensor is in ``memfit.device.virtual.integer_ranges``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.integer_ranges import IntegerRange, note_range, range_of
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.trace.constant_values import value_of

_aten = torch.ops.aten
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

Follow = Callable[[Any, Any, Any], None]
"""Notes what is known of an operator's output: operator, arguments, output."""


def _position(func: Any, args: Any, out: Any) -> None:
    """``argmax(dim)``, whose output is a position along the dimension."""
    if len(args) > 1 and args[1] is not None and args[0].dim():
        _note(out, 0, args[0].shape[args[1]] - 1)


def _positions_beside(dim_at: int, default: int | None = None) -> Follow:
    """``max(dim)``, whose second output are positions along the dimension, the argument at ``dim_at``."""

    def follow(func: Any, args: Any, out: Any) -> None:
        dim = args[dim_at] if len(args) > dim_at else default
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
    if out.dtype in _INTEGERS and out.numel() and isinstance(first, int) and isinstance(step, int):
        last = first + step * (out.numel() - 1)
        _note(out, min(first, last), max(first, last), is_attained=True)


def _shifted(func: Any, args: Any, out: Any) -> None:
    """Counted integers with a number, such as positions from an offset on, where the result is known."""
    between, value = range_of(args[0]), value_of(out)
    has_number = len(args) > 1 and not isinstance(args[1], Tensor)
    if between is None or not between.is_attained or value is None or not has_number or out.dtype not in _INTEGERS:
        return
    with disable_current_modes():
        _note(out, int(value.min()), int(value.max()), is_attained=True)


def _kept(func: Any, args: Any, out: Any) -> None:
    """What holds elements of its first argument alone."""
    between = range_of(args[0])
    if between is not None and out.dtype in _INTEGERS:
        _note(out, between.least, between.largest, is_attained=between.is_attained and func in _KEEP_ALL)


def _view(func: Any, args: Any, out: Any) -> None:
    between = range_of(args[0])
    if between is None or args[0].dtype is torch.bool:
        return
    for made in out if isinstance(out, list | tuple) else (out,):
        if isinstance(made, FakeTensor) and made.dtype == args[0].dtype:
            is_attained = between.is_attained and func in _KEEP_ALL
            note_range(made, between.least, between.largest, between.version, is_attained=is_attained)


def _joined(func: Any, args: Any, out: Any) -> None:
    """What holds elements of all its arguments, some of which may be known."""
    parts = [_range(part) for part in tensors_in(args)]
    known = [part for part in parts if part is not None]
    if known and len(known) == len(parts) and out.dtype in _INTEGERS:
        _note(out, min(part.least for part in known), max(part.largest for part in known))


def _range(tensor: Tensor) -> IntegerRange | None:
    between, value = range_of(tensor), value_of(tensor)
    if between is not None or value is None or value.dtype not in _INTEGERS or not value.numel():
        return between
    with disable_current_modes():
        return IntegerRange(least=int(value.min()), largest=int(value.max()))


def _note(out: Any, least: int, largest: int, *, is_attained: bool = False) -> None:
    if isinstance(out, FakeTensor) and largest >= least:
        note_range(out, least, largest, is_attained=is_attained)


_KEEP_ALL = frozenset(
    {
        _aten._to_copy.default, _aten.clone.default, _aten.view.default, _aten._unsafe_view.default,
        _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default,
        _aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.alias.default, _aten.detach.default,
        _aten.repeat.default,
    }
)  # fmt: skip
"""Operators whose output holds every element of their first argument."""
_FOLLOWED: dict[Any, Follow] = {
    _aten.arange.default: _counted, _aten.arange.start: _counted, _aten.arange.start_step: _counted,
    _aten.add.Tensor: _shifted, _aten.sub.Tensor: _shifted, _aten.mul.Tensor: _shifted, _aten.repeat.default: _kept,
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
