"""Copies that a CUDA operator makes of inputs whose layout its kernel cannot read, and frees before it returns.

From the host code of the operators (ATen/native/cuda/*.cu, ATen/native/Convolution.cpp, ATen/native/cuda/Blas.cpp).
Elementwise operators, reductions, batch norm without cuDNN and the fused attention kernels read any layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import suggest_memory_format
from memfit.torch_compat.operators import optional

_aten = torch.ops.aten

_READ_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    optional("_fused_rms_norm.default"): (0,),
    optional("_fused_rms_norm_backward.default"): (0, 1),
    _aten._softmax.default: (0,),
    _aten._softmax_backward_data.default: (0, 1),
    _aten._log_softmax.default: (0,),
    _aten._log_softmax_backward_data.default: (0, 1),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten.embedding_dense_backward.default: (0,),
    _aten.nll_loss2d_forward.default: (0,),
    _aten.roll.default: (0,),
}
"""Operator -> positions of the tensors that it calls ``contiguous()`` on."""

_MATRICES: dict[Any, tuple[int, ...]] = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
}
"""Operator -> positions of the matrices that it hands to cuBLAS."""


_BATCH_NORM_BACKWARD = _aten.native_batch_norm_backward.default

COPYING = frozenset(
    {
        _aten.convolution.default, _aten.convolution_backward.default, _BATCH_NORM_BACKWARD, *_READ_CONTIGUOUS,
        *_MATRICES,
    }
)  # fmt: skip
"""Every operator that may copy an input."""


def nbytes(tensor: Tensor) -> int:
    """Bytes of a dense copy of the tensor."""
    return tensor.numel() * tensor.itemsize


def _unless_contiguous(tensor: Tensor, layout: torch.memory_format = torch.contiguous_format) -> int:
    return 0 if tensor.is_contiguous(memory_format=layout) else nbytes(tensor)


def _unless_cublas_reads(matrix: Tensor) -> int:
    """cuBLAS takes a matrix by rows or by columns, with any distance between them."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    readable = (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
    return 0 if readable else nbytes(matrix)


def convolution_layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Channels last where the input or the weight is, else plain (cudnn_conv_suggest_memory_format)."""
    layouts = (suggest_memory_format(x), suggest_memory_format(weight))
    if x.dtype is torch.float64 or not torch.backends.cudnn.enabled:
        return torch.contiguous_format
    return next((layout for layout in layouts if layout is not torch.contiguous_format), torch.contiguous_format)


def convolution_copies(func: Any, args: Any) -> int:
    """Bytes of the copies alive during a convolution or its backward; 0 where all have the layout it runs in."""
    if func is _aten.convolution_backward.default:
        grad_output, x, weight = args[:3]
        layout = convolution_layout(x, weight)
        copied = [grad_output, weight, x] if args[10][1] else [grad_output, weight]
    else:
        x, weight = args[:2]
        layout = convolution_layout(x, weight)
        copied = [x, weight]
    return sum(_unless_contiguous(tensor, layout) for tensor in copied)


def takes_cudnn_batch_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Whether cuDNN normalises a batch (_select_batch_norm_backend, Normalization.cpp); its sizes are not looked at."""
    types = (x.dtype, None if weight is None else weight.dtype)
    fits = weight is not None and x.dim() >= 3 and torch.bfloat16 not in types
    return fits and torch.backends.cudnn.enabled and (x.dtype is not torch.float16 or types[1] is torch.float32)


def copies(func: Any, args: Any) -> int:
    """Bytes of the copies alive while an operator called with ``args`` runs; 0 where it makes none."""
    if func is _aten.convolution.default or func is _aten.convolution_backward.default:
        return convolution_copies(func, args)
    if func is _BATCH_NORM_BACKWARD:
        grad_output, x, weight = args[:3]
        of_cudnn = args[7] and takes_cudnn_batch_norm(x, weight)
        return _unless_contiguous(grad_output, suggest_memory_format(x)) if of_cudnn else 0
    positions = _READ_CONTIGUOUS.get(func)
    if positions is not None:
        return sum(_unless_contiguous(args[i]) for i in positions)
    positions = _MATRICES.get(func)
    if positions is not None:
        return sum(_unless_cublas_reads(args[i]) for i in positions)
    return 0
