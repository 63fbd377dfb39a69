"""Tensors of one number that are written to at known places: masks with a hit in each row, such as those of classes.

``mask = torch.zeros(rows, classes); mask[torch.arange(rows), labels] = 1`` has as many hits as rows where the labels
are known, and ``x[mask == 1]`` as many elements. The content of so many floating point numbers is not followed, since
nets' weights and the states of optimizers are made by the same operators. So only the number is noted, and the content
is made when places of it are written to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.torch_compat.attributes import version_of

MOST_ELEMENTS = 1 << 20
"""Integers and booleans of at most so many elements are followed, and the content of filled tensors is made."""

_aten = torch.ops.aten
_SECOND, _THIRD = 1, 2
_FILLED: dict[Any, float | tuple[int]] = {
    _aten.zeros.default: 0, _aten.zeros_like.default: 0, _aten.new_zeros.default: 0,
    _aten.ones.default: 1, _aten.ones_like.default: 1, _aten.new_ones.default: 1,
    _aten.full.default: (_SECOND,), _aten.full_like.default: (_SECOND,), _aten.new_full.default: (_THIRD,),
}  # fmt: skip
"""Operators that fill a tensor, and the number; in brackets, the position of the argument that it is."""
FILLS = frozenset(_FILLED)
PUTS = frozenset(
    {_aten.index_put_.default, _aten.scatter_.value, _aten.index_fill_.int_Scalar, _aten.masked_fill_.Scalar}
)
"""Operators that write at places of their first argument."""


FILLED = "_memfit_fill"
"""The attribute of a tensor that says what it was filled with."""


def note_fill(func: Any, args: Any, out: Any) -> None:
    """Notes what an operator of ``FILLS`` has filled a tensor with."""
    if not isinstance(out, FakeTensor) or out.numel() <= 1 or out.is_inference():
        return
    number: Any = _FILLED[func]
    if isinstance(number, tuple):
        number = args[number[0]] if number[0] < len(args) else None
    if isinstance(number, bool | int | float):
        setattr(out, FILLED, (number, version_of(out), id(out)))


def content_before(target: Any) -> Tensor | None:
    """The content that a tensor had before an operator of ``PUTS`` wrote to it for the first time; None where it was
    not filled, or was written to before, be it through a view."""
    number = filled_number(target)
    if number is None or target.numel() > MOST_ELEMENTS:
        return None
    with disable_current_modes():
        return torch.full(target.shape, number, dtype=target.dtype)


def is_filled_with(target: Any, number: float) -> bool:
    """Whether a tensor was filled with a number, and the operator at hand writes to it for the first time. A real one,
    as in a script for the CPU, says so itself."""
    if isinstance(target, FakeTensor):
        return bool(filled_number(target) == number)
    with disable_current_modes():
        return bool((target == number).all())


def filled_number(target: Any) -> Any:
    """What a tensor was filled with; None where it was not, or was written to since."""
    number, *noted = getattr(target, FILLED, (None,))
    if number is None or noted != [version_of(target), id(target)]:  # a copy has its own count; this write comes after
        return None
    return number
