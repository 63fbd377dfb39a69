"""The espeak-ng speech engine of the package ``espeakng-loader``; as a program, it writes clips to standard output.

    python -m memfit.jobs.data.espeak COUNT SECONDS RATE SEED

The engine keeps state from one text to the next that nothing resets, so that only a fresh process says the same again;
the breath of some voices is noise, whose seed is set before each text.
"""

from __future__ import annotations

import ctypes
import math
import random
import sys

import numpy as np

VOICES = ("en", "en-us", "en-gb-scotland", "en-gb-x-rp", "en-us+f3", "en+f2", "en-us+m4", "en+m7")
SPEEDS = (130, 150, 170, 190)
"""Words a minute."""
SENTENCES = """
the harbour was quiet before the first boats came home
seven grey stones lay in a row beside the garden wall
she counted the lamps on the bridge and wrote the number down
a warm wind from the south carried the smell of rain
please put the heavy box under the small round table
nobody had told him that the train would leave so early
the teacher drew a long line and asked what it might mean
green apples are sharper than red ones but they keep well
every evening the old clock in the hall struck one time too many
they walked along the river until the path turned into sand
bring me a cup of tea and the letter that came yesterday
the mountain looked blue in the morning and brown at noon
if you listen closely you can hear the bees inside the hive
two brothers built a kite out of paper string and patience
our neighbour plays the violin badly but with great joy
snow covered the field and made all the fences look alike
""".strip().splitlines()


class Espeak:
    """The engine in retrieval mode: it hands over 16-bit samples instead of playing them. One for each process."""

    RETRIEVAL, CHARS_UTF8, SPEED = 1, 1, 1

    def __init__(self) -> None:
        import espeakng_loader

        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate: int = self.library.espeak_Initialize(self.RETRIEVAL, 0, data, 0)
        if self.rate <= 0:
            raise RuntimeError(f"it does not start with {data.decode()}")
        signature = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.chunks: list[np.ndarray] = []
        self.callback = signature(self._collect)
        self.library.espeak_SetSynthCallback(self.callback)

    def _collect(self, wave: ctypes._Pointer[ctypes.c_short], count: int, events: int) -> int:
        if wave and count > 0:
            self.chunks.append(np.ctypeslib.as_array(wave, (count,)).copy())
        return 0

    def say(self, text: str, voice: str, speed: int) -> np.ndarray:
        """The text spoken at ``speed`` words a minute: float32 samples at ``self.rate``."""
        if self.library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"no voice {voice!r}")
        self.library.espeak_SetParameter(self.SPEED, speed, 0)
        self.library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        self.chunks.clear()
        spoken = text.encode() + b"\0"
        self.library.espeak_Synth(spoken, ctypes.c_size_t(len(spoken)), 0, 0, 0, self.CHARS_UTF8, None, None)
        self.library.espeak_Synchronize()
        return np.concatenate(self.chunks).astype(np.float32) / 32768


def clips(count: int, seconds: float, rate: int, seed: int) -> dict[str, np.ndarray]:
    """``count`` clips of at most ``seconds``: text, voice (count,); wave_0 …, float32, ``rate`` samples a second."""
    engine, dice = Espeak(), random.Random(seed)
    texts, voices, waves = [], [], []
    for k in range(count):
        voice, speed = VOICES[k % len(VOICES)], dice.choice(SPEEDS)
        words = _words(dice, max(1, round(seconds * dice.uniform(0.2, 0.95) * speed / 60)))
        wave = _resample(engine.say(" ".join(words), voice, speed), engine.rate, rate)
        while len(wave) > seconds * rate and len(words) > 1:
            words = words[: max(1, len(words) * 4 // 5)]
            wave = _resample(engine.say(" ".join(words), voice, speed), engine.rate, rate)
        texts.append(" ".join(words))
        voices.append(voice)
        waves.append(wave[: int(seconds * rate)])
    return {"text": np.array(texts), "voice": np.array(voices)} | {f"wave_{k}": wave for k, wave in enumerate(waves)}


def _words(dice: random.Random, count: int) -> list[str]:
    words: list[str] = []
    while len(words) < count:
        words += dice.choice(SENTENCES).split()
    return words[:count]


def _resample(wave: np.ndarray, old: int, new: int) -> np.ndarray:
    from scipy.signal import resample_poly

    common = math.gcd(old, new)
    return resample_poly(wave, new // common, old // common).astype(np.float32)


if __name__ == "__main__":
    np.savez(sys.stdout.buffer, **clips(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))  # type: ignore[arg-type]
