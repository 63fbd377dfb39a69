"""Operators whose result one known operand decides alone: what is or true, is true, and what is and false, false."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import disable_current_modes

_aten = torch.ops.aten
DECIDED_BY = {
    _aten.bitwise_or.Tensor: True, _aten.logical_or.default: True, _aten.bitwise_or.Scalar: True,
    _aten.bitwise_and.Tensor: False, _aten.logical_and.default: False, _aten.bitwise_and.Scalar: False,
    _aten.bitwise_or_.Tensor: True, _aten.logical_or_.default: True, _aten.bitwise_and_.Tensor: False,
    _aten.logical_and_.default: False, _aten.mul.Tensor: False, _aten.mul_.Tensor: False,
}  # fmt: skip
"""Operators that one operand of this value decides, whatever the other is."""


def decided(func: Any, operands: Iterable[Tensor | None], out: Any) -> Tensor | None:
    """The result that one operand decides; None where none does.

    Args:
        operands: the content of each; None where it is not known.
    """
    decides = DECIDED_BY[func]
    if out.is_floating_point() or out.is_complex():
        return None  # zero times infinity is no zero
    for known in operands:
        if known is None or known.numel() == 0 or (decides and known.dtype is not torch.bool):
            continue
        with disable_current_modes():
            if bool((known == decides).all()):
                return torch.full(out.shape, decides, dtype=out.dtype)
    return None
