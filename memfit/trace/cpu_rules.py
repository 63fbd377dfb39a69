"""What CPU kernels return where torch's shape functions say otherwise: normalisation in mixed precision.

With a half-precision input and float32 weights the CPU kernels keep mean and inverse deviation in float32
(aten/src/ATen/native/cpu/mixed_data_type.h), and give a group norm's input gradient in the input's type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_FORWARD = {_aten.native_batch_norm.default: 1, _aten.native_group_norm.default: 1, _aten.native_layer_norm.default: 2}
"""Normalisations, and the position of their weight."""
_HALF = (torch.bfloat16, torch.float16)


def correct(func: Any, args: Any, out: Any) -> Any:
    """The operator's outputs as the CPU's kernel makes them."""
    if func in _FORWARD:
        weight = args[_FORWARD[func]]
        if args[0].dtype in _HALF and isinstance(weight, Tensor) and weight.dtype is torch.float32:
            return (out[0], *(statistic.new_empty(statistic.shape, dtype=torch.float32) for statistic in out[1:]))
    elif (
        func is _aten.native_group_norm_backward.default
        and isinstance(out[0], Tensor)
        and out[0].dtype is not args[1].dtype
    ):
        return (out[0].new_empty(out[0].shape, dtype=args[1].dtype), *out[1:])
    return out
