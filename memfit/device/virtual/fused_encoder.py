"""The steps of the fused kernels that nn.TransformerEncoderLayer and nn.MultiheadAttention take in evaluation.

Each is one operator, which allocates its steps' tensors inside of itself (ATen/native/transformers/transformer.cpp,
attention.cpp and cuda/attention.cu). None of them takes part in autograd. The steps are operators that have kernels:
below autograd, those that are composed of others would not be taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.attention import EFFICIENT, FLASH, attend, choose
from memfit.device.virtual.card_rules import CardRules

_aten = torch.ops.aten


def encoder_layer(
    card: CardRules | None, src: Tensor, embed_dim: int, heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor,
    norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor,
    ffn_weight_2: Tensor, ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """A whole layer: (B, T, D) -> (B, T, D); NotImplemented for nested and for empty tensors.

    Args:
        card: what the card's attention follows; None on the CPU.
        mask: of keys (B, T), of pairs (T, T) or (B, H, T, T), as ``mask_type`` says.
    """
    if src.is_nested or not src.numel():
        return NotImplemented
    x = _normalized(src, norm_weight_1, norm_bias_1, eps) if norm_first else src
    x = attention(
        card, x, x, x, embed_dim, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
    )[0]
    x.add_(src)
    if not norm_first:
        x = _normalized(x, norm_weight_1, norm_bias_1, eps)
    before = x
    if norm_first:
        x = _normalized(x, norm_weight_2, norm_bias_2, eps)
    hidden = _aten._addmm_activation(ffn_bias_1, x.view(-1, embed_dim), ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view(*src.shape[:2], -1)
    del hidden
    x.add_(before)
    return x if norm_first else _normalized(x, norm_weight_2, norm_bias_2, eps)


def attention(
    card: CardRules | None, query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int,
    qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None,
    need_weights: bool = True, average_weights: bool = True, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Self-attention with its projections: (B, T, D) -> (B, T, D) and the weights (B, T, T), (B, H, T, T) or None."""
    if query.is_nested or not query.numel() or query is not key or key is not value:
        return NotImplemented
    batch, length, head = query.shape[0], query.shape[1], embed_dim // heads
    if card is not None and mask is None and not need_weights and head % 8 == 0:
        whole = query.view(batch, length, heads, head).transpose(1, 2)
        if choose(card, whole, whole, whole, None, 0.0, False, False) in (FLASH, EFFICIENT):
            qkv = torch.addmm(qkv_bias, _rows(query), qkv_weight.t()).view(batch, length, 3, heads, head)
            q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
            joined = _rows(attend(card, q, k, v).transpose(1, 2))
            return torch.addmm(proj_bias, joined.view(-1, embed_dim), proj_weight.t()).view(query.shape), None
    qkv = torch.mm(_rows(query), qkv_weight.t())
    packed = qkv.new_empty(3, batch * heads, length, head)
    del qkv
    weights = torch.bmm(packed[0], packed[1].transpose(1, 2))
    if mask is not None:
        mask = mask if mask.dtype is torch.bool else _aten._to_copy(mask, dtype=torch.bool)
        weights = torch.empty_like(weights)
    torch.bmm(weights, packed[2], out=packed[0])
    if not need_weights:
        del weights
    joined = _rows(packed[0].view(batch, heads, length, head).transpose(1, 2))
    out = torch.addmm(proj_bias, joined.view(-1, embed_dim), proj_weight.t()).view(query.shape)
    del joined
    if not need_weights:
        return out, None
    weights = weights.view(batch, heads, length, length)
    return out, weights.sum(1).div_(heads) if average_weights else weights


def _normalized(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)[0]


def _rows(x: Tensor) -> Tensor:
    """(..., D) -> (rows, D), copied where it is not contiguous."""
    return (x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)).view(-1, x.shape[-1])


FUSED_IN_EVALUATION: dict[Any, Callable[..., Any]] = {
    _aten._transformer_encoder_layer_fwd.default: encoder_layer,
    _aten._native_multi_head_attention.default: attention,
}
"""Operator -> its steps, which take the card's rules first."""
