"""GPT-SoVITS, first stage: phonemes to semantic tokens, a decoder-only transformer of post-norm layers.

Phonemes see each other, tokens see the phonemes and the tokens before them. The mask of that is a tensor of its own,
(b x heads, S, S) in fp32, S the padded phonemes and tokens: memory that grows with the square of the clip's length.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit.jobs.nets.speech_parts import sinusoids


class Positions(nn.Module):
    """Adds sinusoidal positions, times one learned factor."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.alpha * sinusoids(x.shape[1], x.shape[2]).to(x))


class Text2SemanticLayer(nn.Module):
    """A post-norm transformer layer with ReLU."""

    def __init__(self, dim: int, num_heads: int, inner: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.p, self.fused = num_heads, dropout, fused
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.widen, self.narrow = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """mask (b, heads, S, S), added to the scores."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        p = self.p if self.training else 0.0
        with contextlib.nullcontext() if self.fused else sdpa_kernel(SDPBackend.MATH):
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        x = self.attention_norm(x + self.dropout(self.out(h.transpose(1, 2).flatten(2))))
        h = self.narrow(self.dropout(self.widen(x).relu()))
        return self.feed_forward_norm(x + self.dropout(h))


class Text2Semantic(nn.Module):
    """Phonemes and their text features to logits of semantic tokens."""

    def __init__(
        self, *, phonemes: int, tokens: int = 1025, dim: int = 512, depth: int = 24, num_heads: int = 16,
        text_features: int = 1024, dropout: float = 0.1, fused: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.end = num_heads, tokens - 1
        self.phoneme_embedding, self.token_embedding = nn.Embedding(phonemes, dim), nn.Embedding(tokens, dim)
        self.project = nn.Linear(text_features, dim)
        self.phoneme_positions, self.token_positions = (Positions(dim, dropout) for _ in range(2))
        self.layers = nn.ModuleList(Text2SemanticLayer(dim, num_heads, 4 * dim, dropout, fused) for _ in range(depth))
        self.predict = nn.Linear(dim, tokens, bias=False)

    def forward(
        self, phonemes: Tensor, phoneme_lengths: Tensor, tokens: Tensor, token_lengths: Tensor, text_features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """phonemes (b, p), tokens (b, t), text features (b, 1024, p): logits (b, codes, t) and targets (b, t).

        Each token's target is the token after it, the last one's the end token; padding's is -100.
        """
        p, t = phonemes.shape[1], tokens.shape[1]
        at = torch.arange(t, device=tokens.device)[None]
        codes = tokens.masked_fill(at >= token_lengths[:, None], self.end)
        following = F.pad(codes, (0, 1), value=self.end)[:, 1:]
        targets = following.masked_fill(at >= token_lengths[:, None], -100)

        x = self.phoneme_embedding(phonemes) + self.project(text_features.transpose(1, 2))
        y = self.token_positions(self.token_embedding(codes))
        x = torch.cat((self.phoneme_positions(x), y), dim=1)
        mask = self._mask(p, t, phoneme_lengths, token_lengths, x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return self.predict(x[:, p:]).transpose(1, 2), targets

    def _mask(self, p: int, t: int, phoneme_lengths: Tensor, token_lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, heads, S, S): 0 where a position is seen, -inf where not."""
        at = torch.arange(p + t, device=token_lengths.device)
        hidden = (at[None, :] > at[:, None]) & (at[None, :] >= p)
        padding = torch.cat((at[None, :p] >= phoneme_lengths[:, None], at[None, :t] >= token_lengths[:, None]), dim=1)
        hidden = hidden[None, None] | padding[:, None, None].expand(-1, self.num_heads, -1, -1)
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
