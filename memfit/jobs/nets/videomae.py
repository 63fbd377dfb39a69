"""VideoMAE v2, whose features LatentSync compares (TREPA). https://arxiv.org/abs/2303.16727"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VideoBlock(nn.Module):
    """Self-attention (no bias on the keys) and a GELU feed-forward, each on a layer norm."""

    def __init__(self, dim: int, *, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp), nn.GELU(), nn.Linear(mlp, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(n, s, dim) to (n, s, dim)."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        projected = F.linear(self.norm1(x), self.qkv.weight, bias)
        q, k, v = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VideoMae(nn.Module):
    """ViT-g over tubes of 2 frames x 14 x 14 pixels, with the head of its 174 classes, which no feature passes.

    16 frames of 224² are 8 x 16 x 16 = 2048 tokens.
    """

    positions: Tensor

    def __init__(
        self, *, dim: int = 1408, layers: int = 40, heads: int = 16, mlp: int = 6144, size: int = 224, frames: int = 16
    ) -> None:
        super().__init__()
        self.size, patch = size, 14
        self.patch_embed = nn.Conv3d(3, dim, (2, patch, patch), stride=(2, patch, patch))
        self.blocks = nn.ModuleList(VideoBlock(dim, heads=heads, mlp=mlp) for _ in range(layers))
        self.fc_norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, 174)
        tokens = frames // 2 * (size // patch) ** 2
        self.register_buffer("positions", _sinusoids(tokens, dim), persistent=False)

    def forward(self, video: Tensor) -> Tensor:
        """(n, 3, 16, size, size) in [0, 1] to features (n, dim): the mean of the tokens, normed."""
        tokens = self.patch_embed(video).flatten(2).transpose(1, 2)
        x = tokens + self.positions.to(tokens.dtype)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.fc_norm(x.mean(1))
        return out


def trepa_loss(net: VideoMae, made: Tensor, real: Tensor) -> Tensor:
    """Mean squared difference of the unit feature vectors of two videos (n, f, 3, h, w) in [-1, 1]."""
    return F.mse_loss(_features(net, made), _features(net, real))


def _features(net: VideoMae, video: Tensor) -> Tensor:
    n = video.shape[0]
    frames = F.interpolate(video.flatten(0, 1), size=(net.size, net.size), mode="bicubic")
    frames = (frames / 2 + 0.5).clamp(0, 1).unflatten(0, (n, -1)).transpose(1, 2)
    return F.normalize(net(frames), dim=1)


def _sinusoids(length: int, dim: int) -> Tensor:
    """(1, length, dim): even places sine, odd ones cosine."""
    place = torch.arange(dim)
    angles = torch.arange(length)[:, None] * torch.exp(place // 2 * (-2 * math.log(10000.0) / dim))
    return torch.where(place % 2 == 0, angles.sin(), angles.cos())[None]
