"""Clips as GPT-SoVITS sees them: spectrogram, waveform, mel, phonemes, and what stands in for its feature files.

Upstream reads speech features (HuBERT), speaker vectors and semantic tokens from files made beforehand by other nets.
Here they are fixed random projections of the clip's own log spectrum: real input of the right shape and rate.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memfit.jobs.data.mel import log_mel, spectrogram
from memfit.jobs.data.speech import speak

RATE, HOP = 32000, 640
FRAMES_PER_SECOND = RATE // HOP


@dataclass(frozen=True, kw_only=True)
class SovitsClip:
    """One clip; t frames of 50 a second, t even."""

    id: int
    text: str
    wave: Tensor = field(repr=False)
    """(t x 640,) samples of 32 kHz."""
    spectrum: Tensor = field(repr=False)
    """(1025, t)."""
    mel: Tensor = field(repr=False)
    """(about 1.875 t, 100) log-mel frames of 24 kHz, hop 256."""

    def phonemes(self, symbols: int) -> Tensor:
        """Ids below ``symbols``: the text's characters."""
        return torch.tensor([ord(character) % symbols for character in self.text])

    def features(self, channels: int) -> Tensor:
        """(channels, t), in place of self-supervised speech features."""
        return (self._log_spectrum() @ _projection(len(self.spectrum), channels)).T

    def speaker(self, channels: int) -> Tensor:
        """(channels,), in place of a speaker net's vector."""
        return self._log_spectrum().mean(dim=0) @ _projection(len(self.spectrum), channels)

    def tokens(self, codes: int) -> Tensor:
        """(t / 2,) semantic tokens below ``codes``, 25 a second: the strongest of as many projections."""
        return (self._log_spectrum()[::2] @ _projection(len(self.spectrum), codes)).argmax(dim=-1)

    def _log_spectrum(self) -> Tensor:
        logs = self.spectrum.T.log()
        return (logs - logs.mean(dim=0)) / (logs.std(dim=0) + 1e-3)


@functools.cache
def sovits_clips(count: int, seconds: float) -> tuple[SovitsClip, ...]:
    """``count`` clips of synthesized speech of at most ``seconds`` (and at least 0.64, GPT-SoVITS's segment)."""
    clips = []
    for spoken, again in zip(speak(count, seconds, RATE), speak(count, seconds, 24000), strict=True):
        num_frames = max(32, len(spoken.wave) // HOP // 2 * 2)
        wave = torch.from_numpy(spoken.wave)[: num_frames * HOP]
        wave = torch.nn.functional.pad(wave, (0, num_frames * HOP - len(wave)))
        mel = log_mel(torch.from_numpy(again.wave))
        clips.append(
            SovitsClip(id=spoken.id, text=spoken.text, wave=wave, spectrum=spectrogram(wave[None])[0], mel=mel)
        )
    return tuple(clips)


@functools.cache
def _projection(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) / rows**0.5
