"""Operators that have a kernel on CUDA and lack one, or its shapes, on a backend without kernels.

Autograd takes the steps of an operator with a CompositeImplicitAutograd kernel (math_silu_backward: six temporaries)
for any device without a kernel of its own. native_functions.yaml of torch 2.13 names three of these with a CUDA
kernel. The kernels registered here are never run: a fake tensor mode answers before.

Recurrent nets take PyTorch's own cells, one step of time after another. On a card cuDNN would run them whole, with a
reserve of its own, whose size is not public: for these a trace is an estimate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.layout_copies import convolution_layout, takes_cudnn_batch_norm
from memfit.device.virtual.patching import replaced
from memfit.torch_compat import DisableTorchFunction, FakeTensor, c_bindings, scoped_library, suggest_memory_format
from memfit.torch_compat.attributes import CONVOLUTION_LAYOUT
from memfit.torch_compat.tracing import shape_functions

_aten = torch.ops.aten

_contiguous: Any = _aten.contiguous.default

FUSED_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")


def _never_run(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel of the virtual GPU was run on a tensor that is not fake")


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(B, 3H), (B, 3H), (B, H) -> the next state (B, H) and what backward needs (B, 5H); RNN.cu."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    batch, hidden = grad_hy.shape
    gates = [grad_hy.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [grad_hy.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy), *biases)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """CUDA's group norm reads plain tensors, and copies others first (group_norm.cpp); a backend of ours would not."""
    batch, channels = x.shape[:2]
    weight, bias = (None if parameter is None else _contiguous(parameter) for parameter in (weight, bias))
    out: Tensor = _aten.native_group_norm(
        _contiguous(x), weight, bias, batch, channels, math.prod(x.shape[2:]), groups, eps
    )[0]
    return out


def _batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of each channel, in float32 for half precision; Normalization.cuh."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _batch_norm_gather(x: Tensor, means: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return means.new_empty(x.shape[1]), means.new_empty(x.shape[1])


def _batch_norm_apply(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _batch_norm_backward_apply(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _batch_norm_backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, ...]:
    """Two sums for each channel where the input wants a gradient, and the gradients of weight and bias."""
    like = (mean, mean, *[mean if weight is None else weight] * 2)
    channels = [x.shape[1] if want else 0 for want in (wanted[0], *wanted)]
    return tuple(tensor.new_empty(count) for tensor, count in zip(like, channels, strict=True))


SYNC_BATCH_NORM = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather,
    "batch_norm_elemt": _batch_norm_apply,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_apply,
}
"""Operators of nn.SyncBatchNorm, which only CUDA has."""


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:  # fmt: skip
    """cuDNN reads dense tensors: others are copied, and the copy is kept for the backward (Normalization.cpp)."""
    if takes_cudnn_batch_norm(x, weight):
        x = _contiguous(x, memory_format=suggest_memory_format(x))
    out, means, deviations = _aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
    return out, means, deviations, torch.empty(0, dtype=torch.uint8, device=x.device), 0


def _below_torch_function(steps: Callable[..., Any]) -> Callable[..., Any]:
    """As a kernel in C++: it calls no method that a subclass of a tensor has of its own."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return steps(*args, **kwargs)

    return kernel


COMPOSITES: dict[Any, Any] = {
    _aten.group_norm.default: _group_norm,
    _aten._batch_norm_impl_index.default: _batch_norm,
}
"""Operators whose steps on CUDA are not those on another backend, and their steps on CUDA."""


def cuda_outputs(func: Any, args: Any, out: Any) -> Any:
    """An operator's outputs as CUDA's kernel makes them, where torch's shape functions ask for a device named cuda.

    log_sigmoid's buffer is the CPU's alone (Activation.cpp).
    """
    if func is _aten.log_sigmoid_forward.default:
        return out[0], out[0].new_empty(0)
    return out


def _recurrent_cell_fits(
    input_gates: Tensor, hidden_gates: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None, factor: int,
    prev_hidden: Tensor,
) -> None:  # fmt: skip
    """What torch's shape function of a recurrent cell checks, which fails on a cell without biases."""
    torch._check(input_gates.shape == hidden_gates.shape)
    torch._check(prev_hidden.numel() * factor == input_gates.numel())
    for bias in (input_bias, hidden_bias):
        torch._check(bias is None or bias.numel() == input_gates.size(1))


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """The operators above are one operator each on the virtual device, GRU's cell has shapes, and convolutions have
    cuDNN's layout (a backend without kernels has plain ones)."""
    layout_elsewhere = getattr(c_bindings, CONVOLUTION_LAYOUT)

    def layout(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        if isinstance(x, FakeTensor) and x.fake_device.type == NAME:
            return convolution_layout(x, weight)
        return layout_elsewhere(x, weight, backend)

    with (
        replaced(c_bindings, **{CONVOLUTION_LAYOUT: layout}),
        replaced(shape_functions, rnn_cell_checkSizes=_recurrent_cell_fits),
        scoped_library("aten", "IMPL", "PrivateUse1") as library,
        scoped_library("aten", "IMPL", "AutogradPrivateUse1") as composites,
        scoped_library("aten", "IMPL", "Meta") as shapes,
    ):
        for name in FUSED_ON_CUDA:
            library.impl(name, _never_run)
        for op, steps in COMPOSITES.items():
            composites.impl(op, _below_torch_function(steps))
        shapes.impl("_thnn_fused_gru_cell", _gru_cell)
        shapes.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward)
        for name, kernel in SYNC_BATCH_NORM.items():
            shapes.impl(name, kernel)
        yield
