"""GPT-SoVITS, second stage: speech features and phonemes to a waveform (v1 to v2ProPlus) or to mel frames (v3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.jobs.nets.dit import DiT
from memfit.jobs.nets.hifigan import WaveGenerator
from memfit.jobs.nets.vits_parts import (
    Coupling,
    Encoder,
    FrameEncoder,
    RelativeAttention,
    StyleEncoder,
    sequence_mask,
)


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The sizes of a second stage."""

    symbols: int = 732
    spectrum: int = 1025
    style_bins: int = 704
    """Bins of the spectrum that the style encoder sees."""
    features: int = 768
    """Channels of the self-supervised speech features, 50 frames a second."""
    codes: int = 1024
    hidden: int = 192
    inner: int = 768
    num_heads: int = 2
    depth: int = 6
    dropout: float = 0.1
    cross: int = 512
    """Width of the attention from speech to phonemes."""
    style: int = 512
    upsample: int = 512
    kernels: Sequence[int] = (16, 16, 8, 2, 2)
    rates: Sequence[int] = (10, 8, 2, 2, 2)
    start: float = 0.01
    """Standard deviation of the waveform generator's first weights."""
    posterior_depth: int = 16
    flow_depth: int = 4
    speaker: int = 0
    """Channels of a speaker vector (v2Pro); 0: none."""


WIDTHS = {
    "v1": Widths(symbols=322, style_bins=1025),
    "v2": Widths(),
    "v2pro": Widths(style=1024, dropout=0.0, speaker=20480),
    "v2proplus": Widths(style=1024, dropout=0.0, speaker=20480, upsample=768, kernels=(20, 16, 8, 2, 2)),
}
PERIODS = {version: (2, 3, 5, 7, 11) + ((17, 23) if "pro" in version else ()) for version in WIDTHS}


class Codebook(nn.Module):
    """Speech features at half their rate, each replaced by its nearest code. Nothing here learns from the loss."""

    codes: Tensor

    def __init__(self, features: int, codes: int) -> None:
        super().__init__()
        self.halve = nn.Conv1d(features, features, 2, stride=2)
        self.register_buffer("codes", torch.empty(codes, features).uniform_(-1, 1))
        self.register_buffer("average", torch.zeros(codes, features))
        self.register_buffer("counts", torch.zeros(codes))

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """(b, features, t) to (b, features, t), t even: half the rate, quantised, each frame twice."""
        with torch.autocast(features.device.type, enabled=False):
            frames = self.halve(features).transpose(1, 2).flatten(0, 1)
            far = frames.square().sum(1, keepdim=True) - 2 * frames @ self.codes.T + self.codes.T.square().sum(0)
            nearest = F.embedding(far.argmin(dim=-1), self.codes)
        return nearest.unflatten(0, (len(features), -1)).transpose(1, 2).repeat_interleave(2, dim=2)


class TextSpeechEncoder(nn.Module):
    """Quantised speech, told by the phonemes and the style: the prior of the latent frames."""

    def __init__(self, widths: Widths, kernel: int = 3) -> None:
        super().__init__()
        w = widths
        self.project = nn.Conv1d(w.features, w.hidden, 1)
        self.speech = Encoder(w.hidden, w.inner, w.num_heads, w.depth // 2, kernel, w.dropout)
        self.text_embedding = nn.Embedding(w.symbols, w.hidden)
        self.text = Encoder(w.hidden, w.inner, w.num_heads, w.depth, kernel, w.dropout)
        self.cross = CrossEncoder(w.hidden, w.cross)
        self.joint = Encoder(w.hidden, w.inner, w.num_heads, w.depth // 2, kernel, w.dropout)
        self.out = nn.Conv1d(w.hidden, 2 * w.hidden, 1)

    def forward(
        self, codes: Tensor, mask: Tensor, text: Tensor, text_mask: Tensor, style: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden frames, means and log deviations, each (b, hidden, t)."""
        y = self.speech(self.project(codes * mask) * mask, mask)
        phonemes = self.text(self.text_embedding(text).transpose(1, 2), text_mask)
        y = self.joint(self.cross(y, mask, phonemes, text_mask, style), mask)
        means, deviations = (self.out(y) * mask).chunk(2, dim=1)
        return y, means, deviations


class CrossEncoder(nn.Module):
    """Speech frames look at the phonemes; the style is added."""

    def __init__(self, hidden: int, cross: int, num_heads: int = 4) -> None:
        super().__init__()
        self.attention = RelativeAttention(cross, num_heads)
        self.speech_in, self.text_in = nn.Conv1d(hidden, cross, 1), nn.Conv1d(hidden, cross, 1)
        self.out = nn.Conv1d(cross, hidden, 1)

    def forward(self, speech: Tensor, mask: Tensor, text: Tensor, text_mask: Tensor, style: Tensor) -> Tensor:
        pairs = text_mask[:, :, None] * mask[..., None]
        speech, text = self.speech_in(speech * mask), self.text_in(text * text_mask)
        return self.out((self.attention(speech * mask, text * text_mask, pairs) + speech + style) * mask)


class Made(NamedTuple):
    """What the generator gives for the losses."""

    wave: Tensor
    """(b, 1, segment) made samples."""
    start: Tensor
    """(b,) first frame of each segment."""
    mask: Tensor
    flowed: Tensor
    """The posterior's sample in the prior's space; with the prior's means and both log deviations (b, hidden, t)."""
    prior_mean: Tensor
    prior_deviation: Tensor
    posterior_deviation: Tensor


class Sovits(nn.Module):
    """The VITS-like generator of v1, v2, v2Pro and v2ProPlus."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        w = widths
        self.widths = w
        self.codebook = Codebook(w.features, w.codes)
        self.encoder = TextSpeechEncoder(w)
        self.posterior = FrameEncoder(w.spectrum, w.hidden, 2 * w.hidden, w.posterior_depth, w.style)
        self.flow = nn.ModuleList(Coupling(w.hidden, w.hidden, 5, w.flow_depth, w.style) for _ in range(4))
        self.generator = WaveGenerator(w.hidden, w.upsample, w.rates, w.kernels, w.style, w.start)
        self.style = StyleEncoder(w.style_bins, w.style)
        if w.speaker:
            self.speaker = nn.Linear(w.speaker, w.style)
            self.style_gate = nn.PReLU(w.style)
            self.style_to_text = nn.Linear(w.style, w.cross)

    def forward(
        self, features: Tensor, spectrum: Tensor, lengths: Tensor, text: Tensor, text_lengths: Tensor,
        segment: int, speaker: Tensor | None = None,
    ) -> Made:  # fmt: skip
        """One segment of ``segment`` frames of each clip, from a random place."""
        mask, text_mask = sequence_mask(lengths, spectrum.shape[2]), sequence_mask(text_lengths, text.shape[1])
        style = self.style(spectrum[:, : self.widths.style_bins] * mask, mask)
        text_style = style
        if speaker is not None:
            style = self.style_gate(style + self.speaker(speaker)[..., None])
            text_style = self.style_to_text(style.transpose(1, 2)).transpose(1, 2)
        _, prior_mean, prior_deviation = self.encoder(self.codebook(features), mask, text, text_mask, text_style)
        mean, deviation = self.posterior(spectrum, mask, style.detach()).chunk(2, dim=1)
        z = (mean + torch.randn_like(mean) * deviation.exp()) * mask
        flowed = z
        for step in self.flow:
            flowed = step(flowed, mask, style)
        start = (torch.rand(len(lengths), device=z.device) * (lengths - segment + 1).clamp(min=1)).long()
        wave = self.generator(crop(z, start, segment), style)
        return Made(wave, start, mask, flowed, prior_mean, prior_deviation, deviation)


def crop(x: Tensor, start: Tensor, length: int) -> Tensor:
    """(b, c, t) to (b, c, length), each item from its own start."""
    at = start[:, None] + torch.arange(length, device=x.device)
    return x.gather(2, at[:, None].expand(-1, x.shape[1], -1))


class SovitsV3(nn.Module):
    """v3: a frozen text and speech encoder, a trained bridge, and a flow-matching DiT that gives mel frames."""

    def __init__(self, widths: Widths, *, dim: int = 1024, depth: int = 22, num_heads: int = 16) -> None:
        super().__init__()
        w = widths
        self.widths = w
        self.codebook = Codebook(w.features, w.codes).requires_grad_(False)
        self.encoder = TextSpeechEncoder(w).requires_grad_(False)
        self.style = StyleEncoder(w.style_bins, w.style)
        self.bridge = nn.Sequential(nn.Conv1d(w.hidden, w.cross, 1), nn.LeakyReLU())
        self.frames = FrameEncoder(w.cross, w.cross, w.cross, 8, w.style)
        self.mel_head = nn.Conv1d(w.cross, 100, 1)
        """Counted and never used, as upstream."""
        self.dit = DiT(
            dim=dim, depth=depth, num_heads=num_heads, head_dim=dim // num_heads,
            vocabulary=None, text_dim=w.cross, step_embedding=True, ignore_padding=True,
        )  # fmt: skip

    def condition(
        self, features: Tensor, spectrum: Tensor, lengths: Tensor, text: Tensor, text_lengths: Tensor,
        mel_lengths: Tensor, num_frames: int,
    ) -> Tensor:  # fmt: skip
        """What the DiT is told, (b, num_frames, cross): in fp32, the encoder without gradients."""
        with torch.autocast(spectrum.device.type, enabled=False):
            mask = sequence_mask(lengths, spectrum.shape[2])
            style = self.style(spectrum[:, : self.widths.style_bins] * mask, mask)
            with torch.no_grad():
                self.codebook.eval()
                self.encoder.eval()
                text_mask = sequence_mask(text_lengths, text.shape[1])
                hidden, _, _ = self.encoder(self.codebook(features), mask, text, text_mask, style)
        upsampled = F.interpolate(self.bridge(hidden), size=num_frames, mode="nearest")
        return self.frames(upsampled, sequence_mask(mel_lengths, num_frames), style).transpose(1, 2)
