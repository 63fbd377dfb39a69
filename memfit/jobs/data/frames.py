"""Videos of drawn faces that talk: the mouth opens with the loudness of real speech. 25 frames a second, 16 kHz.

Everything is kept in numpy, so that a cached clip is the same inside and outside a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from memfit.jobs.data.speech import speak

if TYPE_CHECKING:
    from torch import Tensor

RATE = 16000
FPS = 25
MEL_COLUMNS = 52
"""Columns of 12.5 ms that a SyncNet hears with 16 frames."""
POSITIONS = 10
"""Whisper's positions (20 ms) around each frame: two frames to each side."""


@dataclass(frozen=True, kw_only=True)
class TalkingClip:
    """A stretch of a video with its sound."""

    id: int
    frames: np.ndarray = field(repr=False)
    """uint8 (f, 3, r, r)."""
    reference: np.ndarray = field(repr=False)
    """uint8 (f, 3, r, r): frames of the same face from elsewhere in the video, as the job is given them."""
    wave: np.ndarray = field(repr=False)
    """float32: the whole video's sound."""
    start: int
    """The first frame's number in the video."""


@functools.cache
def talking_clips(count: int, frames: int, resolution: int, seed: int = 0) -> tuple[TalkingClip, ...]:
    """``count`` clips of so many frames of ``resolution``² pixels, each of another voice, text, face and place.

    Other seeds show other faces, which say other texts.
    """
    spoken = speak(count, max(4.0, 6 * frames / FPS), RATE, seed)
    return tuple(_clip(seed << 32 | k, said.wave, frames, resolution) for k, said in enumerate(spoken))


def _clip(number: int, wave: np.ndarray, frames: int, resolution: int) -> TalkingClip:
    wave = np.pad(wave, (0, max(0, (2 * frames) * RATE // FPS - len(wave))))
    opening = loudness(wave)
    chance = np.random.default_rng(number)
    start, elsewhere = chance.integers(0, len(opening) - frames + 1, 2)
    look = chance.uniform(size=8)
    drawn, reference = (
        np.stack([draw_face(look, opening[first + k], resolution) for k in range(frames)])
        for first in (start, elsewhere)
    )
    return TalkingClip(id=number, frames=drawn, reference=reference, wave=wave, start=int(start))


def stacked(arrays: Iterable[np.ndarray]) -> Tensor:
    """Arrays of one shape as a tensor, one row each."""
    import torch

    return torch.from_numpy(np.stack(list(arrays)))


def loudness(wave: np.ndarray) -> np.ndarray:
    """Root mean square of the sound under each frame, 0 to 1: (frames,)."""
    step = RATE // FPS
    framed = wave[: len(wave) // step * step].reshape(-1, step)
    level = np.sqrt((framed**2).mean(1))
    return level / max(float(level.max()), 1e-6)


def draw_face(look: np.ndarray, opening: float, resolution: int) -> np.ndarray:
    """uint8 (3, r, r): a face of a ``look`` (8 numbers in 0 to 1) whose mouth is open by 0 to 1."""
    scale = 4
    size = scale * resolution

    def box(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        return ((x - width / 2) * size, (y - height / 2) * size, (x + width / 2) * size, (y + height / 2) * size)

    skin = (int(150 + 90 * look[0]), int(110 + 90 * look[1]), int(90 + 80 * look[2]))
    image = Image.new("RGB", (size, size), (int(60 * look[3]), int(90 * look[4]), int(60 + 120 * look[5])))
    draw = ImageDraw.Draw(image)
    draw.ellipse(box(0.5, 0.52, 0.66 + 0.1 * look[6], 0.86), fill=skin)
    for side in (-1, 1):
        draw.ellipse(box(0.5 + 0.14 * side, 0.4, 0.12, 0.07), fill=(250, 250, 250))
        draw.ellipse(box(0.5 + 0.14 * side, 0.4, 0.05, 0.06), fill=(30, 30, 60))
        brow = [_point(0.5 + 0.08 * side, 0.33, size), _point(0.5 + 0.21 * side, 0.32, size)]
        draw.line(brow, fill=(40, 30, 20), width=size // 60)
    nose = [_point(0.5, 0.44, size), _point(0.46, 0.56, size), _point(0.54, 0.56, size)]
    draw.polygon(nose, fill=tuple(int(c * 0.85) for c in skin))
    width = 0.18 + 0.06 * look[7]
    draw.ellipse(box(0.5, 0.7, width + 0.03, 0.05 + 0.17 * opening), fill=(180, 60, 70))
    draw.ellipse(box(0.5, 0.7, width, 0.015 + 0.15 * opening), fill=(60, 10, 20))
    return np.asarray(image.resize((resolution, resolution), Image.Resampling.BOX)).transpose(2, 0, 1).copy()


def _point(x: float, y: float, size: int) -> tuple[float, float]:
    return x * size, y * size


def mouth_mask(resolution: int) -> np.ndarray:
    """float32 (1, r, r): 0 where the mouth and the jaw are, which a job paints anew; 1 elsewhere."""
    mask = np.ones((1, resolution, resolution), np.float32)
    mask[:, resolution // 2 :, resolution // 8 : -resolution // 8] = 0
    return mask


@functools.lru_cache(maxsize=8)
def _whisper_mel(data: bytes) -> np.ndarray:
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    wave = np.frombuffer(data, np.float32)[: 30 * RATE]
    padded = np.pad(wave, (0, 30 * RATE - len(wave)))
    bank = mel_filter_bank(201, 80, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    levels = spectrogram(padded, window_function(400, "hann"), 400, 160, power=2.0, mel_filters=bank, log_mel="log10")
    held = np.maximum(levels[:, :3000], levels[:, :3000].max() - 8)
    return ((held + 4) / 4).astype(np.float32)


def whisper_mel(wave: np.ndarray) -> np.ndarray:
    """float32 (80, 3000): the log-mel of 30 s that Whisper reads, silence after the end."""
    return _whisper_mel(np.ascontiguousarray(wave, np.float32).tobytes())


def whisper_positions(start: int, frames: int) -> np.ndarray:
    """int64 (f, 10): Whisper's positions around each frame from ``start`` on, within the frame's own 30 s."""
    centre = 2 * ((start + np.arange(frames)) % (30 * FPS))
    return np.clip(centre[:, None] + np.arange(-4, POSITIONS - 4), 0, 1499)


def sync_mel(wave: np.ndarray, start: int) -> np.ndarray:
    """float32 (1, 80, 52): log-mel of the 0.65 s from frame ``start`` on, 12.5 ms a column."""
    import torch

    from memfit.jobs.data.mel import log_mel

    first = start * RATE // FPS
    piece = np.pad(wave[first : first + MEL_COLUMNS * 200], (0, MEL_COLUMNS * 200))[: MEL_COLUMNS * 200]
    with torch.device("cpu"):
        mel = log_mel(torch.from_numpy(piece.astype(np.float32)), RATE, 800, 200, 80)
    return mel[:MEL_COLUMNS].T[None].numpy()


def cepstra(wave: np.ndarray, frames: int) -> np.ndarray:
    """float32 (frames, 1, 13, 20): mel-cepstral coefficients of the 0.2 s from each frame on, 10 ms a column."""
    from scipy.fft import dct
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    needed = (frames + 5) * RATE // FPS + 400
    padded = np.pad(wave[:needed], (0, max(0, needed - len(wave))))
    bank = mel_filter_bank(257, 26, 0.0, RATE / 2, RATE)
    window = window_function(400, "hann")
    levels = spectrogram(padded, window, 400, 160, fft_length=512, power=2.0, mel_filters=bank, log_mel="log")
    coefficients = dct(levels, axis=0, norm="ortho")[:13]
    columns = 4 * np.arange(frames)[:, None] + np.arange(20)
    return coefficients[:, columns].transpose(1, 0, 2)[:, None].astype(np.float32)
