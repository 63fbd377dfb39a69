"""Small stand-ins for packages of the upstream scripts that have no build for a CPU or need other programs.

They are written beside the scripts by ``bench.upstream_scripts``. None of them touches the card.
"""

from __future__ import annotations

TORCHAUDIO = """
import soundfile, torch
from torchaudio import transforms
def load(path):
    wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(wave.T.copy()), rate
"""
TORCHAUDIO_TRANSFORMS = """
import torch
class MelSpectrogram(torch.nn.Module):
    def __init__(self, sample_rate, n_fft, win_length, hop_length, n_mels, **options):
        super().__init__()
        self.n_fft, self.hop, self.win = n_fft, hop_length, win_length
        self.register_buffer("window", torch.hann_window(win_length))
        self.register_buffer("bank", torch.rand(n_mels, n_fft // 2 + 1))
    def forward(self, wave):
        return self.bank @ torch.stft(wave, self.n_fft, self.hop, self.win, self.window, return_complex=True).abs()
"""
TORCHVISION_TRANSFORMS = """
from enum import Enum
from torch.nn import functional
class InterpolationMode(Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
class Resize:
    def __init__(self, size, **options):
        self.size = size
    def __call__(self, image):
        rows = functional.interpolate(image.reshape(-1, *image.shape[-3:]).float(), self.size, mode="bilinear")
        return rows.reshape(*image.shape[:-3], *rows.shape[1:])
class Normalize:
    def __init__(self, mean, deviation, inplace=False):
        self.mean, self.deviation = mean[0], deviation[0]
    def __call__(self, image):
        return (image - self.mean) / self.deviation
"""
FFMPEG = """
import numpy
class Error(Exception):
    pass
class Stream:
    def output(self, *names, **options):
        return self
    def run(self, *names, **options):
        return numpy.random.randint(-3000, 3000, 64000).astype(numpy.int16).tobytes(), b""
def input(name, **options):
    return Stream()
"""
OLDER_LIBRARIES = '''
"""Runs a script that was written for an older diffusers; transformers is not told of the stand-in for torchvision."""
import importlib.util, runpy, sys
from functools import partial
find = importlib.util.find_spec
hidden = lambda name, package=None: None if name.split(".")[0] == "torchvision" else find(name, package)
importlib.util.find_spec = hidden
from diffusers.models.modeling_utils import ModelMixin
enable_now = ModelMixin.enable_gradient_checkpointing
def enable(self, *given):
    if type(self).__module__.startswith("diffusers"):
        return enable_now(self, *given)
    self.apply(partial(self._set_gradient_checkpointing, value=True))
ModelMixin.enable_gradient_checkpointing = enable
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
'''

STAND_INS = {
    "torchaudio/__init__.py": TORCHAUDIO,
    "torchaudio/transforms.py": TORCHAUDIO_TRANSFORMS,
    "torchvision/__init__.py": "from torchvision import transforms\n",
    "torchvision/transforms.py": TORCHVISION_TRANSFORMS,
    "ffmpeg.py": FFMPEG,
    "older_libraries.py": OLDER_LIBRARIES,
}
