"""Types of operands that torch's kernels refuse and its kernels for meta tensors let pass.

Without these checks, a job whose first real step raises would be predicted to fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.assumptions import source_line
from memfit.errors import InputError

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
"""The factors are the last two arguments. ``bmm`` and convolutions check theirs themselves."""
_CLASS_LOSSES = {
    _aten.nll_loss_forward.default: (torch.int64, torch.uint8),
    _aten.nll_loss2d_forward.default: (torch.int64,),
}
"""Types of the classes that a loss takes, by its kernel; the second is that of a class for each pixel."""


def is_checked(func: Any) -> bool:
    """Whether ``check_operand_types`` looks at this operator."""
    return func in _PRODUCTS or func in _CLASS_LOSSES


def check_operand_types(func: Any, args: Any) -> None:
    """Refuses a call whose operands have types that no kernel takes.

    Raises:
        InputError: factors of two types are multiplied, or a loss gets classes of a type that is none.
    """
    if func in _PRODUCTS:
        left, right = args[-2:]
        if isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype != right.dtype:
            why = f"{_name(left)} times {_name(right)}, which torch does not multiply"
            raise InputError(f"a matrix product at {source_line()[0]}", why, "convert one of them with .to(dtype)")
    elif func in _CLASS_LOSSES and args[1].dtype not in _CLASS_LOSSES[func]:
        why = f"its classes are {_name(args[1])}, and torch takes int64"
        raise InputError(f"a loss over classes at {source_line()[0]}", why, "convert them with .long()")


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
