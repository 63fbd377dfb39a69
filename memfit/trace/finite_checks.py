"""Checks whether numbers are finite: what each says of numbers that a trace does not know, which are finite.

``isfinite(x)`` is ``(x == x) * (x.abs() != inf)`` and true everywhere; ``isnan(x)`` and ``isinf(x)`` are false
everywhere. What scripts make of them (``~(isnan(loss) | isinf(loss))``, ``isfinite(g).all()``) is followed. Some
number among unknown ones is not zero: ``weight.any()`` is true.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memfit.torch_compat import FakeTensor

TRUTH = "_memfit_truth"
"""Attribute of a fake tensor of truth values: the value of each."""

_aten = torch.ops.aten
_IS_ITSELF = _aten.eq.Tensor
_DIFFERS_FROM_ITSELF = _aten.ne.Tensor
_IS = _aten.eq.Scalar
_IS_NOT = _aten.ne.Scalar
_NEVER = frozenset({_aten.isnan.default, _aten.isinf.default})
_NOT = frozenset({_aten.bitwise_not.default, _aten.logical_not.default})
_AND = frozenset({_aten.mul.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default})
_OR = frozenset({_aten.add.Tensor, _aten.bitwise_or.Tensor, _aten.logical_or.default})
ANY = frozenset({_aten.any.default, _aten.any.dim, _aten.any.dims})
_ALL = frozenset({_aten.all.default, _aten.all.dim, _aten.all.dims})
CHECKS = frozenset(
    {_IS_ITSELF, _DIFFERS_FROM_ITSELF, _IS, _IS_NOT, *_NEVER, *_NOT, *_AND, *_OR, *ANY, *_ALL}
)  # fmt: skip
"""Operators of which ``truth`` may say something."""


def truth(func: Any, args: Any) -> bool | None:
    """The truth value of every element of an operator's result; None where it is not known."""
    first = args[0]
    if not isinstance(first, FakeTensor):
        return None
    if func is _IS_ITSELF or func is _DIFFERS_FROM_ITSELF:
        return func is _IS_ITSELF if first is args[1] else None
    if func is _IS or func is _IS_NOT:
        is_infinity = not isinstance(args[1], complex) and abs(args[1]) == math.inf
        return func is _IS_NOT if is_infinity else None
    if func in _NEVER:
        return False
    known = first.__dict__.get(TRUTH)
    if func in _NOT:
        return None if known is None else not known
    if func in ANY and first.is_floating_point():
        return True if first.numel() else None
    if func in ANY or func in _ALL:
        return known
    if first.dtype is not torch.bool or not isinstance(args[1], FakeTensor):
        return None
    both = (known, args[1].__dict__.get(TRUTH))
    if None in both or args[1].dtype is not torch.bool:
        return None
    return all(both) if func in _AND else any(both)
