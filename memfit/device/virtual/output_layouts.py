"""Layouts of outputs that do not follow those of the inputs, where torch's shape functions say that they do.

From the host code of ATen/native: ``LEGACY_CONTIGUOUS_MEMORY_FORMAT`` in Loss.cpp and in the layer norms,
``resize_as_`` in GatedLinearUnit.cpp, ``set_output_raw_strided`` without strides in SoftMax.cpp; for the CPU alone,
batch_norm_cpu in Normalization.cpp and log_sigmoid_forward_cpu in Activation.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import DisableTorchDispatch, FakeTensor, suggest_memory_format
from memfit.torch_compat.operators import optional

_aten = torch.ops.aten

_CONTIGUOUS = frozenset(
    {
        _aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default, _aten.huber_loss_backward.default,
        _aten.native_layer_norm_backward.default, optional("_fused_rms_norm_backward.default"),
        _aten._softmax.default, _aten._softmax_backward_data.default, _aten.glu_backward.default,
        _aten._log_softmax.default, _aten._log_softmax_backward_data.default,
    }
)  # fmt: skip
"""Operators whose output, or the first of several, is contiguous."""
_CONTIGUOUS_ON_A_CPU = frozenset({_aten.log_sigmoid_forward.default})
_AS_SUGGESTED_ON_A_CPU = {_aten.native_batch_norm.default: 0, _aten.native_batch_norm_backward.default: 1}
"""Operators whose first output is dense, and in channels last where this argument is."""


def layout_of(func: Any, args: Any, *, on_cpu: bool) -> torch.memory_format | None:
    """The layout of an operator's first output; None where torch's shape function knows it."""
    if func in _CONTIGUOUS or (on_cpu and func in _CONTIGUOUS_ON_A_CPU):
        return torch.contiguous_format
    position = _AS_SUGGESTED_ON_A_CPU.get(func) if on_cpu else None
    return None if position is None else suggest_memory_format(args[position])


def laid_out(out: Any, layout: torch.memory_format, make: Callable[[Tensor, torch.device], FakeTensor]) -> Any:
    """An operator's outputs, the first of which is made anew where it is there and has another layout.

    Args:
        make: a fake tensor of a meta tensor on a device.
    """
    several = isinstance(out, tuple | list)
    first = out[0] if several else out
    if not isinstance(first, FakeTensor) or first.is_contiguous(memory_format=layout):
        return out
    with DisableTorchDispatch():
        plain = torch.empty(first.shape, dtype=first.dtype, device="meta", memory_format=layout)
        made = make(plain, first.fake_device)
    return (made, *out[1:]) if several else made
