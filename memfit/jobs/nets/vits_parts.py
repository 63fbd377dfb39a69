"""Parts of VITS (Kim et al. 2021), on which GPT-SoVITS builds: relative attention, WaveNet stacks, flows, encoders.

Tensors are (batch b, channels c, frames t); a mask is (b, 1, t), 1 on valid frames. Attention with relative positions
(Shaw et al. 2018) is not fused: scores of (b, heads, t, t) are real tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.jobs.nets.weight_norm import weight_norm


def sequence_mask(lengths: Tensor, longest: int) -> Tensor:
    """(b,) lengths to (b, 1, longest), 1 on valid positions."""
    return (torch.arange(longest, device=lengths.device)[None, None] < lengths[:, None, None]).float()


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (b, c, t)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class RelativeAttention(nn.Module):
    """Attention of 1x1 convolutions; with ``window``, positions up to that distance have embeddings of their own."""

    def __init__(self, channels: int, num_heads: int, dropout: float = 0.0, window: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.window = num_heads, channels // num_heads, window
        self.query, self.key, self.value, self.out = (nn.Conv1d(channels, channels, 1) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        if window is not None:
            scale = self.head_dim**-0.5
            self.relative_keys = nn.Parameter(torch.randn(1, 2 * window + 1, self.head_dim) * scale)
            self.relative_values = nn.Parameter(torch.randn(1, 2 * window + 1, self.head_dim) * scale)
        for layer in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """mask (b, 1, t, s): 0 where a query must not see a key."""
        q, k, v = (
            layer(of).unflatten(1, (self.num_heads, self.head_dim)).transpose(2, 3)
            for layer, of in ((self.query, x), (self.key, context), (self.value, context))
        )
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(2, 3)
        if self.window is not None:
            scores = scores + _to_absolute(
                (q / math.sqrt(self.head_dim)) @ self._table(self.relative_keys, x.shape[2]).transpose(1, 2)
            )
        weights = self.dropout(scores.masked_fill(mask == 0, -1e4).softmax(dim=-1))
        result = weights @ v
        if self.window is not None:
            result = result + _to_relative(weights) @ self._table(self.relative_values, x.shape[2])
        return self.out(result.transpose(2, 3).flatten(1, 2))

    def _table(self, embeddings: Tensor, length: int) -> Tensor:
        """(1, 2 window + 1, d) cut or filled with zeros to every distance: (1, 2 length - 1, d)."""
        assert self.window is not None
        missing = length - 1 - self.window
        if missing > 0:
            return F.pad(embeddings, (0, 0, missing, missing))
        return embeddings[:, -missing : -missing + 2 * length - 1]


def _to_absolute(scores: Tensor) -> Tensor:
    """(b, h, t, 2t - 1) by distance to (b, h, t, t) by position: each row is shifted one further than the row above."""
    length = scores.shape[2]
    flat = F.pad(F.pad(scores, (0, 1)).flatten(2), (0, length - 1))
    return flat.unflatten(2, (length + 1, 2 * length - 1))[:, :, :length, length - 1 :]


def _to_relative(weights: Tensor) -> Tensor:
    """(b, h, t, t) by position to (b, h, t, 2t - 1) by distance."""
    length = weights.shape[2]
    flat = F.pad(F.pad(weights, (0, length - 1)).flatten(2), (length, 0))
    return flat.unflatten(2, (length, 2 * length))[..., 1:]


class EncoderLayer(nn.Module):
    """A post-norm layer: relative attention, then two convolutions over the frames."""

    def __init__(self, channels: int, inner: int, num_heads: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.attention = RelativeAttention(channels, num_heads, dropout, window=4)
        self.attention_norm = ChannelNorm(channels)
        self.widen, self.narrow = nn.Conv1d(channels, inner, kernel), nn.Conv1d(inner, channels, kernel)
        self.feed_forward_norm = ChannelNorm(channels)
        self.padding = ((kernel - 1) // 2, kernel // 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, pairs: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, x, pairs)))
        h = self.dropout(self.widen(F.pad(x * mask, self.padding)).relu())
        h = self.narrow(F.pad(h * mask, self.padding)) * mask
        return self.feed_forward_norm(x + self.dropout(h))


class Encoder(nn.Module):
    """A stack of encoder layers."""

    def __init__(self, channels: int, inner: int, num_heads: int, depth: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(channels, inner, num_heads, kernel, dropout) for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        pairs = mask[:, :, None] * mask[..., None]
        x = x * mask
        for layer in self.layers:
            x = layer(x, mask, pairs)
        return x * mask


class WaveNet(nn.Module):
    """A stack of gated convolutions with residual and skip paths, each layer shifted by a part of the condition."""

    def __init__(self, channels: int, kernel: int, depth: int, condition: int) -> None:
        super().__init__()
        self.channels, self.depth = channels, depth
        self.condition = weight_norm(nn.Conv1d(condition, 2 * channels * depth, 1))
        self.gates = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, 2 * channels, kernel, padding=kernel // 2)) for _ in range(depth)
        )
        self.outs = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels * (2 if k < depth - 1 else 1), 1)) for k in range(depth)
        )

    def forward(self, x: Tensor, mask: Tensor, condition: Tensor) -> Tensor:
        skips = torch.zeros_like(x)
        shifts = self.condition(condition).chunk(self.depth, dim=1)
        for k, (gate, out) in enumerate(zip(self.gates, self.outs, strict=True)):
            signal, opening = (gate(x) + shifts[k]).chunk(2, dim=1)
            h = out(signal.tanh() * opening.sigmoid())
            if k < self.depth - 1:
                x = (x + h[:, : self.channels]) * mask
                h = h[:, self.channels :]
            skips = skips + h
        return skips * mask


class Coupling(nn.Module):
    """A step of a flow: half of the channels shifts the other half (mean only), then the channels are flipped."""

    def __init__(self, channels: int, hidden: int, kernel: int, depth: int, condition: int) -> None:
        super().__init__()
        self.pre = nn.Conv1d(channels // 2, hidden, 1)
        self.wavenet = WaveNet(hidden, kernel, depth, condition)
        self.post = nn.Conv1d(hidden, channels // 2, 1)
        nn.init.zeros_(self.post.weight)
        nn.init.zeros_(self.post.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mask: Tensor, condition: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        shift = self.post(self.wavenet(self.pre(left) * mask, mask, condition)) * mask
        return torch.cat((left, shift + right * mask), dim=1).flip(1)


class FrameEncoder(nn.Module):
    """1x1 convolution, WaveNet, 1x1 convolution: VITS's posterior encoder, and the bridge of GPT-SoVITS v3."""

    def __init__(self, channels: int, hidden: int, out: int, depth: int, condition: int) -> None:
        super().__init__()
        self.pre = nn.Conv1d(channels, hidden, 1)
        self.wavenet = WaveNet(hidden, 5, depth, condition)
        self.post = nn.Conv1d(hidden, out, 1)

    def forward(self, x: Tensor, mask: Tensor, condition: Tensor) -> Tensor:
        return self.post(self.wavenet(self.pre(x) * mask, mask, condition)) * mask


class StyleEncoder(nn.Module):
    """A clip's frames (b, c, t) to one style vector (b, style, 1)."""

    def __init__(self, channels: int, style: int, hidden: int = 128, num_heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, hidden**0.5
        self.spectral = nn.ModuleList((nn.Linear(channels, hidden), nn.Linear(hidden, hidden)))
        self.temporal = nn.ModuleList(nn.Conv1d(hidden, 2 * hidden, 5, padding=2) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.style = nn.Linear(hidden, style)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padding = mask[:, 0] == 0
        x = x.transpose(1, 2)
        for layer in self.spectral:
            x = layer(x)
            x = self.dropout(x * F.softplus(x).tanh())
        x = x.transpose(1, 2)
        for layer in self.temporal:
            x = x + self.dropout(F.glu(layer(x), dim=1))
        x = x.transpose(1, 2).masked_fill(padding[..., None], 0)
        x = self.style(self._attend(x, padding)).masked_fill(padding[..., None], 0)
        return (x.sum(dim=1) / (~padding).sum(dim=1, keepdim=True))[..., None]

    def _attend(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(2, 3) / self.scale).masked_fill(padding[:, None, None], -math.inf)
        h = self.dropout(scores.softmax(dim=-1)) @ v
        return x + self.dropout(self.out(h.transpose(1, 2).flatten(2)))
