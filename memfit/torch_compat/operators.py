"""Operators of torch by name, where a version may lack some of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.installation import release_number

ABSENT = {"_fused_rms_norm.default": (2, 8), "_fused_rms_norm_backward.default": (2, 9)}
"""Operators that older versions lack, and the first version that has them. Every other one must be there."""


FLASH_STATE_BYTES = 24
"""Random state that flash attention keeps for its backward: seed and offset in one tensor, and an unused number."""


def flash_state_bytes(version: str = torch.__version__) -> int:
    """The same with a version of torch; before 2.7 it is a seed and an offset, in two tensors."""
    return FLASH_STATE_BYTES if release_number(version) >= (2, 7) else 16


def operator(name: str) -> Any:
    """The overload ``mm.default`` of ``torch.ops.aten``.

    Raises:
        AttributeError: this version has none.
    """
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def has_operator(name: str) -> bool:
    """Whether this version of torch has an overload."""
    try:
        operator(name)
    except AttributeError:
        return False
    return True


def optional(name: str) -> Any:
    """The overload; where this version lacks it, a key that no call has."""
    return operator(name) if has_operator(name) else name


def _weight_norm_backward(
    grad: Tensor, direction: Tensor, length: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(direction), torch.empty_like(length)


def _quantized_with_mask(values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Values rounded to what integers reach, and where they are within the bounds (fake_quant_per_tensor_affine.cpp and
    fake_quant_per_channel_affine.cpp in aten/src/ATen/native/quantized)."""
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def _quantized(values: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(values)


def _quantized_backward(
    grad: Tensor, values: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(scale), torch.empty_like(zero_point)


def _contiguous_like_first(values: Tensor, *rest: Any, **named: Any) -> Tensor:
    """A new tensor of the first argument's sizes (Distributions.cpp in aten/src/ATen/native and its folder cuda)."""
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _contiguous_like_second(gradient: Tensor, values: Tensor, *rest: Any) -> Tensor:
    """The gradient of what a loss or a pooling was given (LossMultiMargin.cpp, FractionalMaxPool3d.cpp)."""
    return _contiguous_like_first(values)


_SHAPES = {
    "_weight_norm_interface_backward": _weight_norm_backward,
    "fake_quantize_per_tensor_affine_cachemask": _quantized_with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _quantized_with_mask,
    "fake_quantize_per_channel_affine_cachemask": _quantized_with_mask,
    "_fake_quantize_learnable_per_tensor_affine": _quantized,
    "_fake_quantize_learnable_per_channel_affine": _quantized,
    "_fake_quantize_learnable_per_tensor_affine_backward": _quantized_backward,
    "_fake_quantize_learnable_per_channel_affine_backward": _quantized_backward,
    "_standard_gamma_grad": _contiguous_like_first,
    "_sample_dirichlet": _contiguous_like_first,
    "_dirichlet_grad": _contiguous_like_first,
    "binomial": _contiguous_like_first,
    "multi_margin_loss_backward": _contiguous_like_second,
    "multilabel_margin_loss_backward": _contiguous_like_second,
    "fractional_max_pool3d_backward": _contiguous_like_second,
}
"""Shapes of what operators give, where a version of torch may lack them."""


@contextmanager
def missing_shapes() -> Iterator[None]:
    """Inside, operators whose shapes the installed torch lacks have them."""
    with torch.library._scoped_library("aten", "IMPL", "Meta") as library:
        for name, shapes in _SHAPES.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                library.impl(name, shapes)
        yield
