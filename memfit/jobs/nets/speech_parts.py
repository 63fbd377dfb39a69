"""Parts that the flow-matching speech nets share: time, text and position embeddings, rotary attention, feed-forward.

Tensors are (batch b, frames n, channels d); a mask is (b, n) bool, True on valid frames.
ConvNeXt V2: Woo et al. 2023. Rotary embedding: Su et al. 2021, here on interleaved pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def blank(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with its invalid frames set to 0."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


class TimestepEmbedding(nn.Module):
    """Flow time (b,) to (b, d): 256 sines and cosines, then two linear layers."""

    def __init__(self, dim: int, num_frequencies: int = 256) -> None:
        super().__init__()
        self.waves = num_frequencies // 2
        self.time_mlp = nn.Sequential(nn.Linear(num_frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, time: Tensor) -> Tensor:
        steps = torch.arange(self.waves, device=time.device).float()
        angles = 1000.0 * time.float()[:, None] * torch.exp(steps * -(math.log(10000.0) / (self.waves - 1)))[None, :]
        return self.time_mlp(torch.cat((angles.sin(), angles.cos()), dim=-1).to(time.dtype))


class GlobalResponseNorm(nn.Module):
    """ConvNeXt V2's global response normalisation, over the frames."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, dim))
        self.beta = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        response = energy / (energy.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * response) + self.beta + x


class ConvNeXtBlock(nn.Module):
    """A ConvNeXt V2 block over the frames: depthwise convolution of 7, then a widened feed-forward."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.widen = nn.Linear(dim, inner)
        self.response = GlobalResponseNorm(inner)
        self.narrow = nn.Linear(inner, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return x + self.narrow(self.response(blank(F.gelu(self.widen(self.norm(h))), mask)))


class TextEmbedding(nn.Module):
    """Characters to one vector a frame. Id -1 pads; the text is cut or filled up to the number of frames.

    ``vocabulary`` None: the text comes as vectors (b, n, d) already.
    """

    positions: Tensor

    def __init__(
        self, vocabulary: int | None, dim: int, num_layers: int, ignore_padding: bool = False, longest: int = 4096
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary + 1, dim) if vocabulary is not None else None
        self.blocks = nn.ModuleList(ConvNeXtBlock(dim, 2 * dim) for _ in range(num_layers))
        self.ignore_padding, self.longest = ignore_padding, longest
        self.register_buffer("positions", sinusoids(longest, dim) if num_layers else None, persistent=False)

    def forward(self, text: Tensor, num_frames: int, keep: Tensor | None = None) -> Tensor:
        """text (b, t) ids or (b, n, d) vectors to (b, num_frames, d). ``keep`` (b,), 0 or 1: 0 drops an item's text."""
        mask = None
        if self.embedding is not None:
            text = F.pad((text + 1)[:, :num_frames], (0, max(0, num_frames - text.shape[1])))
            mask = text != 0
            x = self.embedding(text if keep is None else text * keep.long()[:, None])
        else:
            x = text if keep is None else text * keep[:, None, None]
        if not self.blocks:
            return x
        x = blank(x + self.positions[torch.arange(num_frames, device=x.device).clamp(max=self.longest - 1)], mask)
        for block in self.blocks:
            x = blank(block(x, mask if self.ignore_padding else None), mask)
        return x


def sinusoids(length: int, dim: int) -> Tensor:
    """(length, dim): cosines, then sines, of position / 10000^(2i/dim)."""
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, dim, 2).float() / dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class ConvPositionEmbedding(nn.Module):
    """Position from neighbourhood: two grouped convolutions of 31 frames, each with a Mish."""

    def __init__(self, dim: int, kernel: int = 31, groups: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=groups) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = blank(F.mish(layer(x.transpose(1, 2))).transpose(1, 2), mask)
        return x


class InputEmbedding(nn.Module):
    """Noised mel, conditioning mel and text, joined into one vector a frame, plus its conv position."""

    def __init__(self, mel: int, text_dim: int, dim: int, groups: int = 16) -> None:
        super().__init__()
        self.project = nn.Linear(2 * mel + text_dim, dim)
        self.conv_position = ConvPositionEmbedding(dim, groups=groups)

    def forward(self, noised: Tensor, condition: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        x = blank(self.project(torch.cat((noised, condition, text), dim=-1)), mask)
        return self.conv_position(x, mask) + x


def rotary_angles(length: int, dim: int, device: torch.device) -> Tensor:
    """(length, dim) angles; each pair of channels shares one."""
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2, device=device).float() / dim)
    return torch.outer(torch.arange(length, device=device).float(), frequencies).repeat_interleave(2, dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x (b, heads, n, d) turned by the angles (n, d), pair by pair; contiguous."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    return (x * angles.cos() + turned * angles.sin()).to(x.dtype).contiguous()


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions, through the fused kernels.

    With ``ignore_padding`` the mask is given expanded to (b, heads, n, n), as upstream gives it: torch makes numbers of
    it at that size, in every block, and keeps them for backward.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        inner, self.num_heads = num_heads * head_dim, num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, inner) for _ in range(3))
        self.to_out = nn.Linear(inner, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, angles: Tensor, ignore_padding: bool) -> Tensor:
        heads = (self.num_heads, -1)
        q, k, v = (layer(x).unflatten(-1, heads).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v))
        keys = None
        if ignore_padding and mask is not None:
            keys = mask[:, None, None, :].expand(-1, q.shape[1], q.shape[2], -1)
        out = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, attn_mask=keys)
        return blank(self.dropout(self.to_out(out.transpose(1, 2).flatten(-2))), mask)


class FeedForward(nn.Sequential):
    """Linear, GELU (tanh form), dropout, linear."""

    def __init__(self, dim: int, inner: int, dropout: float) -> None:
        super().__init__(nn.Linear(dim, inner), nn.GELU(approximate="tanh"), nn.Dropout(dropout), nn.Linear(inner, dim))
