"""Outputs of group and layer norms, which torch's shape functions compute step by step at some milliseconds a shape.

From the host code of ATen/native: group_norm.cpp, layer_norm.cpp, cuda/layer_norm_kernel.cu and, for the types of
statistics, cpu/mixed_data_type.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.data_dependent import NOT_HANDLED
from memfit.torch_compat import DisableTorchDispatch, FakeTensor, suggest_memory_format

_aten = torch.ops.aten


def run(func: Any, args: Any, tensors: Sequence[FakeTensor]) -> Any:
    """The outputs as meta tensors, or NOT_HANDLED.

    Args:
        tensors: the fake tensors among the arguments.
    """
    shapes = _SHAPES.get(func)
    if shapes is None or len({tensor.fake_device for tensor in tensors}) > 1:
        return NOT_HANDLED
    with DisableTorchDispatch():
        return shapes(*args, on_cpu=tensors[0].fake_device.type == "cpu")


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, channels: int, inner: int, groups: int,
    eps: float, *, on_cpu: bool,
) -> Any:  # fmt: skip
    """x (N, C, ...) -> the output of x's shape, mean and inverse deviation (N, groups)."""
    layout = _layout(x, on_cpu)
    if not x.is_contiguous(memory_format=layout):
        return NOT_HANDLED
    statistics = _type_of_statistics(x, weight, bias)
    return (
        _empty(x.shape, x.dtype, layout),
        *(_empty((batch, groups), statistics) for _ in range(2)),
    )


def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor | None, batch: int, channels: int,
    inner: int, groups: int, wanted: Sequence[bool], *, on_cpu: bool,
) -> Any:  # fmt: skip
    """Gradients of x, weight (C,) and bias (C,), each where it is wanted."""
    layout = _layout(x, on_cpu)
    if not x.is_contiguous(memory_format=layout) or (weight is None and any(wanted[1:])):
        return NOT_HANDLED
    return (
        _empty(x.shape, x.dtype, layout) if wanted[0] else None,
        *(_empty((channels,), weight.dtype) if weight is not None and want else None for want in wanted[1:]),
    )


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, *, on_cpu: bool
) -> Any:
    """x (..., *shape) -> the output of x's shape, mean and inverse deviation (..., 1 for each dimension of shape)."""
    outer = x.dim() - len(shape)
    if tuple(x.shape[outer:]) != tuple(shape):
        return NOT_HANDLED
    statistics = _type_of_statistics(x, weight, bias) if on_cpu else torch.promote_types(x.dtype, torch.float32)
    seen = (*x.shape[:outer], *(1 for _ in shape))
    return _empty(x.shape, x.dtype), _empty(seen, statistics), _empty(seen, statistics)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, deviation: Tensor, weight: Tensor | None,
    bias: Tensor | None, wanted: Sequence[bool], *, on_cpu: bool,
) -> Any:  # fmt: skip
    """Gradients of x, weight and bias, each where it is there and wanted."""
    parameters = zip((weight, bias), wanted[1:], strict=True)
    return (
        _empty(x.shape, x.dtype) if wanted[0] else None,
        *(_empty(each.shape, each.dtype) if each is not None and want else None for each, want in parameters),
    )


def _type_of_statistics(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """That of the input; float32 where the parameters have another."""
    parameter = weight if weight is not None else bias
    return x.dtype if parameter is None or parameter.dtype is x.dtype else torch.float32


def _layout(x: Tensor, on_cpu: bool) -> torch.memory_format:
    layout: torch.memory_format = suggest_memory_format(x) if on_cpu else torch.contiguous_format
    return layout


def _empty(shape: Sequence[int], dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta", memory_format=layout)


_SHAPES: dict[Any, Callable[..., Any]] = {
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
