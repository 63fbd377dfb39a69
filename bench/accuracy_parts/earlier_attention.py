"""scaled_dot_product_attention as torch 2.0 and 2.1 had it on cards in half precision, as far as memory sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memfit.device.virtual.patching import replaced

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
"""Of the installed torch: its output lies as the queries do. Its backward holds more than FlashAttention 1 does."""


@contextmanager
def flash_attention_1() -> Iterator[None]:
    """Context in which attention without a mask, in float16 or bfloat16, is FlashAttention 1, as on an A100.

    Up to torch 2.1 that kernel took samples one after the other, of shape (samples x length, heads, size). Tensors that
    do not lie so, as those of ``nn.MultiheadAttention``, were copied for it in the forward and again in the backward,
    and its output lay so, whatever the queries' strides (ATen/native/transformers/cuda/attention.cu and
    attention_backward.cu of 2.1). Where the keys take several blocks, each pass holds a float32 result beside that
    (fmha_api.cpp, ``o_tmp`` and ``dq_tmp``).
    """
    plain = functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if attn_mask is None and _suits(query, key):
            out: Tensor = _Attention.apply(query, key, value)
            return out
        return plain(query, key, value, attn_mask, *args, **kwargs)

    with replaced(functional, scaled_dot_product_attention=attention):
        yield


def _suits(query: Tensor, key: Tensor) -> bool:
    size = query.shape[-1]
    alike = query.dim() == 4 and query.shape[1] == key.shape[1]
    return alike and query.dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 128


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [_from_rows(_in_rows(tensor), tensor) for tensor in (query, key, value)]
        out, sums = _flash(*rows)[:2]
        partial = _partial(out, key)
        del rows, partial
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        rows = [_in_rows(tensor) for tensor in (query, key, value, gradient, out)]
        gradients = [torch.empty_like(row) for row in rows[:3]]
        within = torch.empty_like(sums), _partial(rows[0], key)
        del rows, within
        return tuple(_from_rows(*pair) for pair in zip(gradients, (query, key, value), strict=True))


def _in_rows(tensor: Tensor) -> Tensor:
    """(samples, heads, length, size) as (samples x length, heads, size), copied where it does not lie so."""
    samples, heads, length, size = tensor.shape
    return tensor.transpose(1, 2).reshape(samples * length, heads, size)


def _from_rows(rows: Tensor, like: Tensor) -> Tensor:
    samples, heads, length, size = like.shape
    return rows.view(samples, length, heads, size).transpose(1, 2)


def _partial(rows: Tensor, key: Tensor) -> Tensor | None:
    """The float32 result of a pass over several blocks of keys; None where one block holds them all."""
    block = 128 if key.shape[-1] > 64 else 256
    return torch.empty_like(rows, dtype=torch.float32) if key.shape[2] > block else None
