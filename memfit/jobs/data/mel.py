"""Waveforms to the frames that speech models learn: log-mel of 24 kHz (F5-TTS), spectrograms of 32 kHz (GPT-SoVITS).

The short-time Fourier transform is torch's, the mel filters are transformers'.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F


def log_mel(wave: Tensor, rate: int = 24000, n_fft: int = 1024, hop: int = 256, bands: int = 100) -> Tensor:
    """(samples,) to (1 + samples // hop, bands): log of the magnitude mel spectrum, at least log(1e-5)."""
    magnitude = _stft(F.pad(wave[None], (n_fft // 2, n_fft // 2), mode="reflect")[0], n_fft, hop).abs()
    return (magnitude.T @ filters(rate, n_fft, bands, "htk")).clamp(min=1e-5).log()


def spectrogram(wave: Tensor, n_fft: int = 2048, hop: int = 640) -> Tensor:
    """(samples,) to (samples // hop, n_fft // 2 + 1): magnitudes, the frames centred on their hop."""
    margin = (n_fft - hop) // 2
    spectrum = _stft(F.pad(wave[None], (margin, margin), mode="reflect")[0], n_fft, hop)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-6).sqrt().T


def _stft(wave: Tensor, n_fft: int, hop: int) -> Tensor:
    window = torch.hann_window(n_fft, device=wave.device, dtype=wave.dtype)
    return torch.stft(wave, n_fft, hop, window=window, center=False, return_complex=True)


@functools.cache
def filters(rate: int, n_fft: int, bands: int, scale: str) -> Tensor:
    """(n_fft // 2 + 1, bands) triangular mel filters on the CPU; scale "htk", or "slaney" with its area norm."""
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
    return torch.from_numpy(bank).to(torch.float32)
