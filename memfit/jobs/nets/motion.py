"""Motion modules: attention over time, at every pixel by itself.

Guo et al., AnimateDiff, https://arxiv.org/abs/2307.04725. Starts as the identity: the last projection is zero.
"""

from __future__ import annotations

import math

import torch
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from memfit.jobs.nets.attention import Attention


class TemporalBlock(nn.Module):
    """Two self-attentions over time, each on a layer norm and a sinusoidal position, then a GEGLU feed-forward."""

    positions: Tensor

    def __init__(self, dim: int, *, heads: int, longest: int) -> None:
        super().__init__()
        self.attention_blocks = nn.ModuleList(Attention(dim, heads=heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.ff = FeedForward(dim, activation_fn="geglu")
        self.ff_norm = nn.LayerNorm(dim)
        self.register_buffer("positions", _sinusoids(longest, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(n, f, dim) to (n, f, dim)."""
        for norm, attention in zip(self.norms, self.attention_blocks, strict=True):
            x = attention(norm(x) + self.positions[:, : x.shape[1]]) + x
        out: Tensor = self.ff(self.ff_norm(x)) + x
        return out


class MotionModule(nn.Module):
    """(b, c, f, h, w) to the same; attention runs on (b·h·w, f, c), at most ``longest`` frames."""

    def __init__(self, channels: int, *, heads: int = 8, groups: int = 32, longest: int = 24) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.proj_in = nn.Linear(channels, channels)
        self.transformer_blocks = nn.ModuleList([TemporalBlock(channels, heads=heads, longest=longest)])
        self.proj_out = nn.Linear(channels, channels)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, c, f, h, w = x.shape
        frames = x.transpose(1, 2).reshape(b * f, c, h, w)
        pixels = self.norm(frames).permute(0, 2, 3, 1).reshape(b * f, h * w, c)
        tokens = self.proj_in(pixels).unflatten(0, (b, f)).transpose(1, 2).reshape(b * h * w, f, c)
        for block in self.transformer_blocks:
            tokens = block(tokens)
        mixed = tokens.unflatten(0, (b, h * w)).transpose(1, 2).reshape(b * f, h * w, c)
        out = self.proj_out(mixed).reshape(b * f, h, w, c).permute(0, 3, 1, 2).contiguous()
        return (out + frames).unflatten(0, (b, f)).transpose(1, 2)


def _sinusoids(length: int, dim: int) -> Tensor:
    """(1, length, dim): sine and cosine in turn, wavelengths from 2π to 20000π."""
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[None]
