"""Memory that CUDA's libraries and kernels take inside of one operator: bytes as functions of its arguments.

A trace cannot see it: it comes from the caching allocator and is given back (all but cuBLAS's) before the operator
returns. Sources: FlashAttention 2's and CUTLASS's host code as PyTorch builds them, PyTorch's cuBLAS handle pool, and
a fit to 5,085 measured runs for convolutions. None was compared with a card by us.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.device.hardware.catalogue import cublas_workspace_bytes
from memfit.device.virtual.attention import is_either
from memfit.device.virtual.card_rules import CardRules, plain
from memfit.device.virtual.card_scratch import (
    BRAIN,
    CONVOLUTION_BACKWARD,
    EFFICIENT_BACKWARD,
    EITHER_FORWARD,
    FLASH_FORWARD,
    FLOAT,
    FULL,
    HALF,
    card_scratch,
    rounded_head,
)
from memfit.device.virtual.layout_copies import COPYING, convolution_layout, copies

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_KINDS = {torch.float32: FULL, torch.float16: HALF, torch.bfloat16: BRAIN}

CUBLAS_OPERATORS = frozenset(
    {
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default,
        _aten.mv.default, _aten.addbmm.default, _aten.dot.default, _aten.vdot.default, _aten.addmm_.default,
        _aten.baddbmm_.default, _aten._scaled_mm.default,
    }
)  # fmt: skip
"""The first of these in a thread makes its cuBLAS workspace, which stays. Forward is one thread, backward another."""

TAKING = CUBLAS_OPERATORS | COPYING | {
    _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default, _aten._sample_dirichlet.default,
    _aten.im2col.default,
}  # fmt: skip
"""Every operator that may take memory inside of itself."""


def cublas_workspace(card: CardRules) -> int:
    """Bytes of the workspace of one cuBLAS handle and stream; two threads (forward, backward) have one each.

    PyTorch's default: 2 x 4096 KiB + 8 x 16 KiB; 32 MiB on Hopper and Blackwell. CUBLAS_WORKSPACE_CONFIG overrides it,
    as in PyTorch. cublasLt shares it.

    Traces of cards that differ in it alone are shared: see ``memfit.trace.cublas_workspaces``.
    """
    configured = configured_workspace()
    return cublas_workspace_bytes(plain(card).compute_capability) if configured is None else configured


def configured_workspace() -> int | None:
    """Bytes of a workspace as CUBLAS_WORKSPACE_CONFIG=:KiB:COUNT… sets them; None where it does not."""
    configured = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * 1024 * int(count) for kib, count in configured) if configured else None


def convolution_backward_call(args: Any) -> str:
    """Describes a ``convolution_backward`` called with ``args``, which takes memory once around dgrad and once around
    wgrad; empty where this depends on no card.

    1.0 x (input + weight + output bytes), for convolutions with a kernel above 1 that are not depthwise: the channels-
    last copies that tensor core kernels make of NCHW tensors. Fitted for float32 with TF32 on one A100; for half types
    the same reason is taken to hold, unmeasured. Channels-last tensors need no copies, and float32 without TF32 runs
    on kernels that read NCHW: 0.
    """
    grad_output, x, weight, groups = args[0], args[1], args[2], args[9]
    pointwise = all(size == 1 for size in weight.shape[2:])
    kind = _KINDS.get(x.dtype)
    if pointwise or (groups > 1 and groups == x.shape[1]) or kind is None:
        return ""
    if kind == FULL and not torch.backends.cudnn.allow_tf32:
        return ""
    if convolution_layout(x, weight) is not torch.contiguous_format:
        return ""
    tensors = sum(tensor.numel() * tensor.itemsize for tensor in (x, weight, grad_output))
    return f"{CONVOLUTION_BACKWARD} {copies(_aten.convolution_backward.default, args)} {tensors} {kind}"


def flash_forward_call(query: Tensor, key: Tensor, dropout_p: float) -> str:
    """Describes flash's forward; empty with dropout, which does not split the keys. query (B, H, Lq, D), key
    (B, Hk, Lk, D)."""
    batch, heads, lq, head = query.shape
    return "" if dropout_p else f"{FLASH_FORWARD} {batch * heads} {lq} {key.shape[2]} {head}"


def flash_backward_scratch(query: Tensor, key: Tensor) -> int:
    """Bytes alive during flash's backward: a number per row, dq in float32 and, with fewer key heads, dk and dv for all
    heads. query (B, H, Lq, D), key (B, Hk, Lk, D)."""
    batch, heads, lq, head = query.shape
    rows = batch * heads * math.ceil(lq / 128) * 128
    expanded = 2 * batch * key.shape[2] * heads * head * query.itemsize if key.shape[1] != heads else 0
    return rows * FLOAT + rows * rounded_head(head) * FLOAT + expanded


def efficient_backward_scratch(query: Tensor, value: Tensor) -> int:
    """Bytes alive at the worst moment of the efficient kernel's backward in float32: the product of output and its
    gradient, then a number per row. query (B, H, Lq, D), value (B, H, Lk, Dv)."""
    batch, heads, lq, _ = query.shape
    return batch * heads * lq * (value.shape[3] + 1) * FLOAT


def efficient_backward_call(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Describes the efficient kernel's backward in a half type. query (B, H, Lq, D), key (B, H, Lk, D), value
    (B, H, Lk, Dv)."""
    batch, heads, lq, head = query.shape
    return f"{EFFICIENT_BACKWARD} {batch * heads} {lq} {key.shape[2]} {head} {value.shape[3]}"


def card_call(func: Any, args: Any) -> str:
    """Describes a call whose scratch depends on the card, for ``card_scratch``; empty for all others."""
    if func is _aten.convolution_backward.default:
        return convolution_backward_call(args)
    if func is _aten._scaled_dot_product_flash_attention.default:
        call = flash_forward_call(args[0], args[1], args[3] if len(args) > 3 else 0.0)
        return call.replace(FLASH_FORWARD, EITHER_FORWARD) if is_either() else call
    if func is _aten._scaled_dot_product_efficient_attention_backward.default and args[1].dtype in _HALF:
        return efficient_backward_call(args[1], args[2], args[3])
    return ""


def moments(func: Any, args: Any) -> int:
    """How often a call takes its scratch, one moment after another."""
    return max(1, sum(args[10][:2])) if func is _aten.convolution_backward.default else 1


def unfold_scratch(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> int:  # fmt: skip
    """Bytes of the output as it is made, of the size of x (B, C, H, W), where it is resized to more than that."""
    windows = [
        (size + 2 * pad - step * (width - 1) - 1) // jump + 1
        for size, width, step, pad, jump in zip(x.shape[-2:], kernel, dilation, padding, stride, strict=True)
    ]
    is_more = math.prod(kernel) * math.prod(windows) > math.prod(x.shape[-2:])
    return x.numel() * x.itemsize if is_more else 0


def scratch(card: CardRules, func: Any, args: Any) -> tuple[int, ...]:
    """Bytes that an operator takes besides its outputs, one moment after another: each is freed before the next.

    Empty for an operator that takes nothing, or of which nothing is known (cuDNN's attention).
    """
    call = card_call(func, args)
    if call:
        nbytes = card_scratch(card, call)
    elif func is _aten._scaled_dot_product_flash_attention_backward.default:
        nbytes = flash_backward_scratch(args[1], args[2])
    elif func is _aten._scaled_dot_product_efficient_attention_backward.default:
        nbytes = efficient_backward_scratch(args[1], args[3])
    elif func is _aten._sample_dirichlet.default:  # the sums of gammas that divide them, in cuda/Distributions.cpp
        nbytes = math.prod(args[0].shape[:-1]) * args[0].itemsize
    elif func is _aten.im2col.default:
        nbytes = unfold_scratch(*args)
    else:
        nbytes = copies(func, args)
    return (nbytes,) * moments(func, args) if nbytes else ()
