"""Operands that torch's kernels refuse and its kernels for meta tensors let pass: their types, places and numbers.

Without these checks, a job whose first real step raises would be predicted to fit. Operators that take operands of one
type say so in host code in aten/src/ATen/native that both kinds of device share, or their kernels read all operands as
one type. So do norms on a card (cuda/layer_norm_kernel.cu, cuda/group_norm_kernel.cu); on a CPU, they take parameters
in float32 beside inputs in half precision (cpu/mixed_data_type.h).
"""

from __future__ import annotations

import math
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
_SAME_TYPES = {
    _aten.convolution.default: (0, 1, 2),
    _aten.addmm.default: (0, 2),
    _aten.mv.default: (0, 1),
    _aten.addmv.default: (0, 1, 2),
    _aten.addbmm.default: (0, 1, 2),
    _aten.index_put.default: (0, 2),
    _aten.index_put_.default: (0, 2),
    _aten.index_add.default: (0, 3),
    _aten.index_add_.default: (0, 3),
    _aten.index_copy.default: (0, 3),
    _aten.index_copy_.default: (0, 3),
    _aten.index_reduce.default: (0, 3),
    _aten.index_reduce_.default: (0, 3),
    _aten.put.default: (0, 2),
    _aten.put_.default: (0, 2),
    _aten.grid_sampler_2d.default: (0, 1),
    _aten.grid_sampler_3d.default: (0, 1),
    _aten._cdist_forward.default: (0, 1),
    _aten.binary_cross_entropy.default: (0, 1, 2),
    _aten.nll_loss_forward.default: (0, 2),
    _aten.nll_loss2d_forward.default: (0, 2),
    _aten.complex.default: (0, 1),
    _aten.polar.default: (0, 1),
    _aten.heaviside.default: (0, 1),
    _aten.linalg_cross.default: (0, 1),
}
"""Which arguments of an operator have to have one type."""
_WRITES_NUMBERS = frozenset({_aten.index_put.default, _aten.index_put_.default})
_NORMS = {_aten.native_layer_norm.default: (2, 3), _aten.native_group_norm.default: (1, 2)}
"""Norms, and which arguments are their parameters."""
_INDEXED = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
"""Operators whose second argument is a list of indices, which lie on the CPU or where the first lies."""
_WRITTEN_NUMBERS = {
    _aten.fill_.Scalar: 1,
    _aten.fill.Scalar: 1,
    _aten.masked_fill.Scalar: 2,
    _aten.masked_fill_.Scalar: 2,
    _aten.constant_pad_nd.default: 2,
    _aten.index_fill.int_Scalar: 3,
    _aten.index_fill_.int_Scalar: 3,
    _aten.scatter.value: 3,
    _aten.scatter_.value: 3,
}
"""Operators that write a number, which they convert to the tensor's type with a check (``Scalar::to``), and which of
their arguments it is."""
_REACHES = (torch.float16, torch.bfloat16, torch.float32)
"""Types whose largest number such an operator checks; those of 8 bits are left out."""
_CHECKED = frozenset({*_PRODUCTS, *_CLASS_LOSSES, *_SAME_TYPES, *_NORMS, *_INDEXED, *_WRITTEN_NUMBERS})


def is_checked(func: Any) -> bool:
    """Whether ``check_operand_types`` looks at this operator."""
    return func in _CHECKED


def check_operand_types(func: Any, args: Any) -> None:
    """Refuses a call whose operands have types that no kernel takes, or lie where none takes them.

    Raises:
        InputError: operands of two types are combined that have to have one, a loss gets classes of a type that is
            none, a tensor of the host is indexed by one of the card, or a number is written to a tensor whose type does
            not reach so far.
    """
    if func in _WRITTEN_NUMBERS:
        _check_number(func, args)
    if func in _INDEXED and args[0].device.type == "cpu" and any(map(_is_elsewhere, args[1])):
        why = "a tensor on the CPU by indices on the card, which torch refuses"
        raise InputError(f"an index at {source_line()[0]}", why, "move the indices with .cpu(), or the tensor")
    if func in _PRODUCTS:
        left, right = args[-2:]
        if isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype != right.dtype:
            why = f"{_name(left)} times {_name(right)}, which torch does not multiply"
            raise InputError(f"a matrix product at {source_line()[0]}", why, "convert one of them with .to(dtype)")
    elif func in _CLASS_LOSSES and args[1].dtype not in _CLASS_LOSSES[func]:
        why = f"its classes are {_name(args[1])}, and torch takes int64"
        raise InputError(f"a loss over classes at {source_line()[0]}", why, "convert them with .long()")
    if func in _SAME_TYPES:
        _check_same_type(func, args, _SAME_TYPES[func])
    elif func in _NORMS and not _takes_mixed_types(args[0]):
        _check_same_type(func, args, (0, *_NORMS[func]))


def _check_number(func: Any, args: Any) -> None:
    """Refuses a finite number beyond the largest of a floating point type, as masks in half precision often have."""
    place = _WRITTEN_NUMBERS[func]
    tensor, number = args[0], args[place] if place < len(args) else 0
    if tensor.dtype not in _REACHES or isinstance(number, complex) or not math.isfinite(number):
        return
    most = torch.finfo(tensor.dtype).max
    if abs(number) > most:
        why = f"{number:g} is beyond {_name(tensor)}, which reaches to {most:g}, and torch refuses it"
        name = str(func).split(".")[1].strip("_")
        raise InputError(f"{name} at {source_line()[0]}", why, "write torch.finfo(tensor.dtype).min, or float('-inf')")


def _is_elsewhere(index: Tensor | None) -> bool:
    return index is not None and index.device.type != "cpu"


def _takes_mixed_types(inputs: Tensor) -> bool:
    """Whether a norm of these inputs takes parameters in float32 beside them."""
    return inputs.device.type == "cpu" and inputs.dtype in (torch.float16, torch.bfloat16)


def _check_same_type(func: Any, args: Any, places: tuple[int, ...]) -> None:
    """Refuses operands of two types. A single number is written in the type of what it is written to."""
    operands = [args[place] for place in places if place < len(args) and isinstance(args[place], Tensor)]
    types = list(dict.fromkeys(_name(operand) for operand in operands))
    if len(types) < 2 or (func in _WRITES_NUMBERS and operands[-1].numel() == 1):
        return
    name = str(func).split(".")[1].removeprefix("native_").strip("_")
    why = f"its arguments are {' and '.join(types)}, which torch does not combine"
    raise InputError(f"{name} at {source_line()[0]}", why, "convert one of them with .to(dtype)")


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
