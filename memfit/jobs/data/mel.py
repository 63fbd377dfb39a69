"""Waveforms to the frames that speech models learn: log-mel of 24 kHz (F5-TTS), spectrograms of 32 kHz (GPT-SoVITS).

The short-time Fourier transform is torch's, the mel filters are transformers'.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_COMPRESSED = (32000, 2048, 128)
"""Rate, size of the transform and bands of ``compress``."""


def log_mel(wave: Tensor, rate: int = 24000, n_fft: int = 1024, hop: int = 256, bands: int = 100) -> Tensor:
    """(samples,) to (1 + samples // hop, bands): log of the magnitude mel spectrum, at least log(1e-5)."""
    magnitude = _stft(wave[None], n_fft, hop, n_fft // 2)[0].abs()
    return (magnitude.T @ torch.from_numpy(filters(rate, n_fft, bands, "htk"))).clamp(min=1e-5).log()


def spectrogram(wave: Tensor, n_fft: int = 2048, hop: int = 640) -> Tensor:
    """(b, samples) to (b, n_fft // 2 + 1, samples // hop): magnitudes, the frames centred on their hop."""
    spectrum = _stft(wave, n_fft, hop, (n_fft - hop) // 2)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-6).sqrt()


def compress(spectrum: Tensor) -> Tensor:
    """A spectrogram (b, 1025, t) of 32 kHz as log-mel (b, 128, t)."""
    bank = torch.tensor(filters(*_COMPRESSED, "slaney").T, device=spectrum.device)
    return (bank @ spectrum).clamp(min=1e-5).log()


def make_filters() -> None:
    """Makes the filters of ``compress``, for a job's setup: transformers keeps frames of its first import alive, with
    the tensors of a step that it is imported in."""
    filters(*_COMPRESSED, "slaney")


def _stft(wave: Tensor, n_fft: int, hop: int, margin: int) -> Tensor:
    window = torch.hann_window(n_fft, device=wave.device, dtype=wave.dtype)
    wave = F.pad(wave, (margin, margin), mode="reflect")
    return torch.stft(wave, n_fft, hop, window=window, center=False, return_complex=True)


@functools.cache
def filters(rate: int, n_fft: int, bands: int, scale: str) -> np.ndarray:
    """(n_fft // 2 + 1, bands) triangular mel filters, float32; scale "htk", or "slaney" with its area norm."""
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(
        num_frequency_bins=n_fft // 2 + 1,
        num_mel_filters=bands,
        min_frequency=0.0,
        max_frequency=rate / 2,
        sampling_rate=rate,
        norm="slaney" if scale == "slaney" else None,
        mel_scale=scale,
    )
    return bank.astype(np.float32)
