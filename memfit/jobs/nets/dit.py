"""The diffusion transformers of F5-TTS (DiT, adaLN-zero: Peebles and Xie 2023) and E2 TTS (UNetT, a flat U-Net).

Both take noised mel, conditioning mel (b, n, mel), text and flow time (b,), and give a flow (b, n, mel).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from memfit.jobs.nets.speech_parts import (
    FeedForward,
    InputEmbedding,
    RotaryAttention,
    TextEmbedding,
    TimestepEmbedding,
    rotary_angles,
)


class DiTBlock(nn.Module):
    """A transformer block whose norms are scaled, shifted and gated by the flow time (adaLN-zero)."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, ff_mult: int, dropout: float) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.attn_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = RotaryAttention(dim, num_heads, head_dim, dropout)
        self.ff_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff = FeedForward(dim, ff_mult * dim, dropout)

    def forward(self, x: Tensor, time: Tensor, mask: Tensor | None, angles: Tensor, ignore_padding: bool) -> Tensor:
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = self.modulation(time)[:, None].chunk(6, dim=-1)
        h = self.attn_norm(x) * (1 + scale_a) + shift_a
        x = x + gate_a * self.attn(h, mask, angles, ignore_padding)
        h = self.ff_norm(x) * (1 + scale_f) + shift_f
        return x + gate_f * self.ff(h)


class DiT(nn.Module):
    """F5-TTS's net. ``vocabulary`` None: text as vectors; ``step_embedding``: a second time, the length of the step."""

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        num_heads: int,
        head_dim: int = 64,
        ff_mult: int = 2,
        dropout: float = 0.1,
        mel: int = 100,
        vocabulary: int | None = 2545,
        text_dim: int = 512,
        text_layers: int = 4,
        step_embedding: bool = False,
        ignore_padding: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.ignore_padding = head_dim, ignore_padding
        self.time_embed = TimestepEmbedding(dim)
        self.step_embed = TimestepEmbedding(dim) if step_embedding else None
        self.text_embed = TextEmbedding(vocabulary, text_dim, text_layers, ignore_padding)
        self.input_embed = InputEmbedding(mel, text_dim, dim)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(dim, num_heads, head_dim, ff_mult, dropout) for _ in range(depth)
        )
        self.out_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.out_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.out = nn.Linear(dim, mel)
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        blocks = [cast(DiTBlock, block).modulation[1] for block in self.transformer_blocks]
        for layer in (*blocks, self.out_modulation[1], self.out):
            nn.init.zeros_(cast(nn.Linear, layer).weight)
            nn.init.zeros_(cast(nn.Linear, layer).bias)

    def forward(
        self,
        noised: Tensor,
        condition: Tensor,
        text: Tensor,
        time: Tensor,
        mask: Tensor | None = None,
        keep_text: Tensor | None = None,
        step: Tensor | None = None,
    ) -> Tensor:
        t = self.time_embed(time)
        if self.step_embed is not None and step is not None:
            t = t + self.step_embed(step)
        text = self.text_embed(text, noised.shape[1], keep_text)
        x = self.input_embed(noised, condition, text, mask)
        angles = rotary_angles(x.shape[1], self.head_dim, x.device)
        for block in self.transformer_blocks:
            x = block(x, t, mask, angles, self.ignore_padding)
        scale, shift = self.out_modulation(t)[:, None].chunk(2, dim=-1)
        return self.out(self.out_norm(x) * (1 + scale) + shift)


class UNetTBlock(nn.Module):
    """A pre-norm transformer block; in the second half it first joins what its mirror in the first half gave."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, ff_mult: int, dropout: float, joins: bool) -> None:
        super().__init__()
        self.join = nn.Linear(2 * dim, dim, bias=False) if joins else None
        self.attn_norm = nn.RMSNorm(dim, eps=1e-6)
        self.attn = RotaryAttention(dim, num_heads, head_dim, dropout)
        self.ff_norm = nn.RMSNorm(dim, eps=1e-6)
        self.ff = FeedForward(dim, ff_mult * dim, dropout)

    def forward(self, x: Tensor, skip: Tensor | None, mask: Tensor, angles: Tensor, ignore_padding: bool) -> Tensor:
        if self.join is not None and skip is not None:
            x = self.join(torch.cat((x, skip), dim=-1))
        x = x + self.attn(self.attn_norm(x), mask, angles, ignore_padding)
        return x + self.ff(self.ff_norm(x))


class UNetT(nn.Module):
    """E2 TTS's net: the flow time is a first token; block k of the second half joins the output of its mirror."""

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        num_heads: int,
        head_dim: int = 64,
        ff_mult: int = 4,
        dropout: float = 0.1,
        mel: int = 100,
        vocabulary: int = 2545,
        ignore_padding: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.ignore_padding = head_dim, ignore_padding
        self.time_embed = TimestepEmbedding(dim)
        self.text_embed = TextEmbedding(vocabulary, mel, 0)
        self.input_embed = InputEmbedding(mel, mel, dim)
        self.transformer_blocks = nn.ModuleList(
            UNetTBlock(dim, num_heads, head_dim, ff_mult, dropout, joins=2 * k >= depth) for k in range(depth)
        )
        self.out_norm = nn.RMSNorm(dim, eps=1e-6)
        self.out = nn.Linear(dim, mel)

    def forward(
        self,
        noised: Tensor,
        condition: Tensor,
        text: Tensor,
        time: Tensor,
        mask: Tensor,
        keep_text: Tensor | None = None,
    ) -> Tensor:
        text = self.text_embed(text, noised.shape[1], keep_text)
        x = self.input_embed(noised, condition, text, mask)
        x = torch.cat((self.time_embed(time)[:, None], x), dim=1)
        mask = nn.functional.pad(mask, (1, 0), value=True)
        angles = rotary_angles(x.shape[1], self.head_dim, x.device)
        skips: list[Tensor] = []
        for k, block in enumerate(self.transformer_blocks):
            first_half = 2 * k < len(self.transformer_blocks)
            if first_half:
                skips.append(x)
            x = block(x, None if first_half else skips.pop(), mask, angles, self.ignore_padding)
        return self.out(self.out_norm(x)[:, 1:])
