"""``torch._grouped_mm``, the matrix products of a mixture of experts, in every type.

torch's own shape function (2.13) takes bfloat16 alone, while the kernels of a CPU take all floating types and those of
a card convert. The output follows ``create_grouped_gemm_output_tensor`` (aten/src/ATen/native/GroupedMMUtils.h): rows
are padded to 16 bytes. Operands are checked as ``check_valid_strides_and_return_transposed`` there checks them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.data_dependent import NOT_HANDLED
from memfit.torch_compat import FakeTensorMode

_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)
_DEFAULT = _GROUPED.default if _GROUPED is not None else None


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """The output of a grouped product on fake tensors; for another operator, or bfloat16, NOT_HANDLED.

    Raises:
        RuntimeError: rows or columns of an operand do not begin at multiples of 16 bytes; with torch's own words.
    """
    if _GROUPED is None or func is not _GROUPED.default or args[0].dtype is torch.bfloat16:
        return NOT_HANDLED
    first, second = args[:2]
    _check_strides(first)
    _check_strides(second)
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = (args[4] if len(args) > 4 else kwargs.get("out_dtype")) or first.dtype
    shape = _shape(first, second, offsets)
    padding = max(16 // dtype.itemsize, 1)
    row = -(-shape[-1] // padding) * padding
    stride = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, stride, dtype=dtype, device=first.device)


def _check_strides(matrix: Tensor) -> None:
    rows, columns = matrix.stride()[-2:]
    if rows == 1 and columns >= max(1, matrix.shape[-2]):
        longer = columns
    elif columns == 1 and rows >= max(1, matrix.shape[-1]):
        longer = rows
    else:
        sizes = f"{list(matrix.stride())} for strides and {list(matrix.shape)} for sizes"
        raise RuntimeError(f"Invalid strides/sizes, got {sizes}")
    if longer * matrix.element_size() % 16:
        raise RuntimeError("strides should be multiple of 16 bytes")


def _shape(first: Tensor, second: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    """(M, N), or (groups, M, N): of 2 and 3 dimensions, the groups are parts of the rows, columns or inner one."""
    if first.dim() == 2 and second.dim() == 2:
        groups = offsets.shape[0] if offsets is not None else 1
        return groups, first.shape[0], second.shape[1]
    if first.dim() == 2:
        return first.shape[0], second.shape[-1]
    if second.dim() == 2:
        return first.shape[1], second.shape[1]
    return first.shape[0], first.shape[1], second.shape[-1]


class GroupedProductsMode(FakeTensorMode):
    """torch's mode of tensors without bytes, which has these products too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEFAULT:
            with self:
                product = run(func, args, kwargs or {})
            if product is not NOT_HANDLED:
                return product
        return super().__torch_dispatch__(func, types, args, kwargs)
