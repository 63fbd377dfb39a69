"""Attention without bias on the projections to queries, keys and values, as Stable Diffusion has it, and its blocks."""

from __future__ import annotations

import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention of x (n, s, dim) over context (n, t, context_dim), through torch's fused kernel.

    Four weight matrices and the output's bias; ``bias`` adds those of queries, keys and values.
    """

    def __init__(self, dim: int, *, heads: int, context_dim: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=bias)
        self.to_k = nn.Linear(context_dim or dim, dim, bias=bias)
        self.to_v = nn.Linear(context_dim or dim, dim, bias=bias)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.to_out(mixed.transpose(1, 2).flatten(2))
        return out


class CrossBlock(nn.Module):
    """Self-attention, cross-attention over the audio, and a GEGLU feed-forward, each on a layer norm."""

    def __init__(self, dim: int, *, heads: int, context_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1 = Attention(dim, heads=heads)
        self.attn2 = Attention(dim, heads=heads, context_dim=context_dim)
        self.ff = FeedForward(dim, activation_fn="geglu")

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x (n, s, dim), context (n, t, context_dim) to (n, s, dim)."""
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context) + x
        out: Tensor = self.ff(self.norm3(x)) + x
        return out


class SpatialTransformer(nn.Module):
    """One ``CrossBlock`` over the pixels of every frame by itself: (b, c, f, h, w) with context (b, f, t, d)."""

    def __init__(self, channels: int, *, heads: int, context_dim: int, groups: int = 32) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.proj_in = nn.Conv2d(channels, channels, 1)
        self.transformer_blocks = nn.ModuleList([CrossBlock(channels, heads=heads, context_dim=context_dim)])
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, c, f, h, w = x.shape
        frames = x.transpose(1, 2).reshape(b * f, c, h, w)
        context = context.flatten(0, 1)
        tokens = self.proj_in(self.norm(frames)).permute(0, 2, 3, 1).reshape(b * f, h * w, c)
        for block in self.transformer_blocks:
            tokens = block(tokens, context)
        mixed = tokens.reshape(b * f, h, w, c).permute(0, 3, 1, 2).contiguous()
        return (self.proj_out(mixed) + frames).unflatten(0, (b, f)).transpose(1, 2)
