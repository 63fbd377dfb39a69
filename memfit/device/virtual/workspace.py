"""Memory that CUDA's libraries and kernels take inside of one operator: bytes as functions of its arguments.

A trace cannot see it: it comes from the caching allocator and is given back (all but cuBLAS's) before the operator
returns. Sources: FlashAttention 2's and CUTLASS's host code as PyTorch builds them, PyTorch's cuBLAS handle pool, and
a fit to 5,085 measured runs for convolutions. None was compared with a card by us.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch
from torch import Tensor

from memfit.device.hardware.catalogue import cublas_workspace_bytes
from memfit.device.virtual.card_rules import CardRules, plain
from memfit.device.virtual.layout_copies import COPYING, convolution_layout, copies

_aten = torch.ops.aten
_FLOAT = 4
_HALF = (torch.float16, torch.bfloat16)

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
    _aten._scaled_dot_product_efficient_attention_backward.default,
}  # fmt: skip
"""Every operator that may take memory inside of itself."""


def cublas_workspace(card: CardRules) -> int:
    """Bytes of the workspace of one cuBLAS handle and stream; two threads (forward, backward) have one each.

    PyTorch's default: 2 x 4096 KiB + 8 x 16 KiB; 32 MiB on Hopper and Blackwell. CUBLAS_WORKSPACE_CONFIG=:KiB:COUNT…
    overrides it, as in PyTorch. cublasLt shares it.

    Traces of cards that differ in it alone are shared: see ``memfit.trace.cublas_workspaces``.
    """
    configured = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if configured:
        return sum(int(kib) * 1024 * int(count) for kib, count in configured)
    return cublas_workspace_bytes(plain(card).compute_capability)


def convolution_backward_workspace(card: CardRules, args: Any) -> int:
    """Bytes taken once around dgrad and once around wgrad in a ``convolution_backward`` called with ``args``.

    1.0 x (input + weight + output bytes), for convolutions with a kernel above 1 that are not depthwise: the channels-
    last copies that tensor core kernels make of NCHW tensors. Fitted for float32 with TF32 on one A100; for half types
    the same reason is taken to hold, unmeasured. Channels-last tensors need no copies, and float32 without TF32 runs
    on kernels that read NCHW: 0.
    """
    grad_output, x, weight, groups = args[0], args[1], args[2], args[9]
    pointwise = all(size == 1 for size in weight.shape[2:])
    if pointwise or (groups > 1 and groups == x.shape[1]) or not _runs_on_tensor_cores(card, x.dtype):
        return 0
    if convolution_layout(x, weight) is not torch.contiguous_format:
        return 0
    return sum(tensor.numel() * tensor.itemsize for tensor in (x, weight, grad_output))


def _runs_on_tensor_cores(card: CardRules, dtype: torch.dtype) -> bool:
    if dtype in _HALF:
        return card.is_at_least(8 if dtype is torch.bfloat16 else 7, 0)
    return dtype is torch.float32 and torch.backends.cudnn.allow_tf32 and card.is_at_least(8, 0)


def flash_forward_scratch(card: CardRules, query: Tensor, key: Tensor, dropout_p: float) -> int:
    """Bytes of the partial outputs where flash splits the keys over idle multiprocessors; 0 where it does not.

    query (B, H, Lq, D), key (B, Hk, Lk, D). The queries are B x H x ceil(Lq / 64) blocks.
    """
    batch, heads, lq, head = query.shape
    if dropout_p:
        return 0
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    splits = card.flash_splits(batch * heads * math.ceil(lq / 64), math.ceil(key.shape[2] / block))
    return splits * batch * heads * lq * (1 + _rounded_head(head)) * _FLOAT if splits > 1 else 0


def _rounded_head(head: int) -> int:
    return math.ceil(head / 32) * 32 if head <= 192 else 256


def flash_backward_scratch(query: Tensor, key: Tensor) -> int:
    """Bytes alive during flash's backward: a number per row, dq in float32 and, with fewer key heads, dk and dv for all
    heads. query (B, H, Lq, D), key (B, Hk, Lk, D)."""
    batch, heads, lq, head = query.shape
    rows = batch * heads * math.ceil(lq / 128) * 128
    expanded = 2 * batch * key.shape[2] * heads * head * query.itemsize if key.shape[1] != heads else 0
    return rows * _FLOAT + rows * _rounded_head(head) * _FLOAT + expanded


def efficient_backward_scratch(card: CardRules, query: Tensor, key: Tensor, value: Tensor) -> int:
    """Bytes alive at the worst moment of the efficient kernel's backward. query (B, H, Lq, D), value (B, H, Lk, Dv).

    float32 (and half on Volta): the product of output and its gradient, then a number per row. Half: a number per row
    and dq (for heads wider than a block, dk and dv too) in float32, in blocks of 64 x 64.
    """
    batch, heads, lq, head = query.shape
    per_row = batch * heads * lq * _FLOAT
    if query.dtype not in _HALF or (card.is_at_least(7, 0) and card.is_at_most(7, 0)):
        return batch * heads * lq * value.shape[3] * _FLOAT + per_row
    blocks = math.ceil(lq / 64) * math.ceil(head / 64) * (64 * 64 * _FLOAT + 16)
    if head > 128:
        blocks += (
            math.ceil(key.shape[2] / 64) * 64 * (math.ceil(head / 64) + math.ceil(value.shape[3] / 64)) * 64 * _FLOAT
        )
    return per_row + batch * heads * blocks


def scratch(card: CardRules, func: Any, args: Any) -> tuple[int, ...]:
    """Bytes that an operator takes besides its outputs, one moment after another: each is freed before the next.

    Empty for an operator that takes nothing, or of which nothing is known (cuDNN's attention).
    """
    if func is _aten.convolution_backward.default:
        nbytes = copies(func, args) + convolution_backward_workspace(card, args)
        return (nbytes,) * max(1, sum(args[10][:2])) if nbytes else ()
    if func is _aten._scaled_dot_product_flash_attention.default:
        nbytes = flash_forward_scratch(card, args[0], args[1], args[3] if len(args) > 3 else 0.0)
    elif func is _aten._scaled_dot_product_flash_attention_backward.default:
        nbytes = flash_backward_scratch(args[1], args[2])
    elif func is _aten._scaled_dot_product_efficient_attention_backward.default:
        nbytes = efficient_backward_scratch(card, args[1], args[2], args[3])
    else:
        nbytes = copies(func, args)
    return (nbytes,) if nbytes else ()
