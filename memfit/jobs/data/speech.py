"""Real speech, made on the spot by the espeak-ng speech engine (the package ``espeakng-loader`` ships it).

Nothing is downloaded, and nothing is written to disk. The same arguments give the same samples on every machine that
has the same espeak-ng.
"""

from __future__ import annotations

import functools
import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from memfit.errors import InputError, install_extra, is_installed
from memfit.jobs.data.mel import log_mel


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A spoken text: mono samples in -1 to 1, float32, at ``rate`` samples a second."""

    id: int
    text: str
    voice: str
    wave: np.ndarray = field(repr=False)
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.wave) / self.rate


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """A clip as a text-to-speech model sees it: the text, and its mel frames (n, 100)."""

    id: int
    text: str
    mel: Tensor = field(repr=False)

    def characters(self, vocabulary: int) -> list[int]:
        """The text's characters as ids below ``vocabulary``."""
        return [ord(character) % vocabulary for character in self.text]


@functools.cache
def speak(count: int, seconds: float, rate: int, seed: int = 0) -> tuple[Clip, ...]:
    """``count`` clips of 0.2 to 1 times ``seconds``, by several voices and speeds, at ``rate`` samples a second.

    Other seeds say other texts.

    Raises:
        InputError: the package ``espeakng-loader`` is missing, or its engine does not speak.
    """
    if not is_installed("espeakng_loader"):
        raise InputError(
            "this job's speech", "it needs espeakng_loader, which is not installed", f"run {install_extra('jobs')}"
        )
    command = [sys.executable, "-m", "memfit.jobs.data.espeak", *map(str, (count, seconds, rate, seed))]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        cure = "pip install --force-reinstall espeakng-loader"
        raise InputError(f"espeak-ng: {chr(32).join(last)}", "it does not speak", cure)
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as said:
        texts, voices = said["text"].tolist(), said["voice"].tolist()
        return tuple(
            Clip(id=k, text=texts[k], voice=voices[k], wave=said[f"wave_{k}"], rate=rate) for k in range(count)
        )


HOP = 256
"""Samples from one mel frame to the next, of 24 kHz."""


@functools.cache
def synthesize(count: int, seconds: float) -> Sequence[Utterance]:
    """``count`` utterances of at most ``seconds``: mel frames of 24 kHz, hop 256."""
    return tuple(
        Utterance(id=clip.id, text=clip.text, mel=log_mel(torch.from_numpy(clip.wave), hop=HOP)[: most_frames(seconds)])
        for clip in speak(count, seconds, 24000)
    )


def frame_counts(count: int, seconds: float) -> list[int]:
    """Mel frames of each utterance that ``synthesize`` makes, without making them."""
    return [min(1 + len(clip.wave) // HOP, most_frames(seconds)) for clip in speak(count, seconds, 24000)]


def most_frames(seconds: float) -> int:
    """Mel frames of the longest utterance."""
    return int(seconds * 24000 / HOP)
