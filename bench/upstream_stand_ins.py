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
import random
from enum import Enum
import numpy, torch
from torch.nn import functional as nearby
class InterpolationMode(Enum):
    NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"
class Compose:
    def __init__(self, parts):
        self.parts = parts
    def __call__(self, image):
        for part in self.parts:
            image = part(image)
        return image
class Lambda:
    def __init__(self, function):
        self.function = function
    def __call__(self, image):
        return self.function(image)
def pair(size):
    return (size, size) if isinstance(size, int) else tuple(size)
class Resize:
    def __init__(self, size, interpolation=InterpolationMode.BILINEAR, **options):
        self.size = size
    def __call__(self, image):
        if not isinstance(image, torch.Tensor):
            return image.resize(pair(self.size))
        rows = nearby.interpolate(image.reshape(-1, *image.shape[-3:]).float(), self.size, mode="bilinear")
        return rows.reshape(*image.shape[:-3], *rows.shape[1:])
class RandomResizedCrop(Resize):
    pass
class CenterCrop:
    def __init__(self, size):
        self.rows, self.columns = pair(size)
    def __call__(self, image):
        width, height = image.size
        left, top = (width - self.columns) // 2, (height - self.rows) // 2
        return image.crop((left, top, left + self.columns, top + self.rows))
class RandomCrop(CenterCrop):
    pass
class RandomHorizontalFlip:
    def __call__(self, image):
        return image.transpose(0) if random.random() < 0.5 else image
class PILToTensor:
    def __call__(self, image):
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
class ToTensor(PILToTensor):
    def __call__(self, image):
        return super().__call__(image).float() / 255
class ConvertImageDtype:
    def __init__(self, dtype):
        self.dtype = dtype
    def __call__(self, image):
        return image.to(self.dtype) / 255
class Normalize:
    def __init__(self, mean, deviation, inplace=False):
        self.mean, self.deviation = mean[0], deviation[0]
    def __call__(self, image):
        return (image - self.mean) / self.deviation
"""
TORCHVISION_OPS = """
from torch import nn
class FrozenBatchNorm2d(nn.Module):
    pass
"""
TORCHVISION_DATASETS = """
class ImageFolder:
    pass
CIFAR100 = CIFAR10 = MNIST = KMNIST = FashionMNIST = ImageFolder
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
    "torchvision/transforms/__init__.py": TORCHVISION_TRANSFORMS,
    "torchvision/transforms/functional.py": "from torchvision.transforms import InterpolationMode\n",
    "torchvision/ops/__init__.py": "",
    "torchvision/ops/misc.py": TORCHVISION_OPS,
    "torchvision/datasets.py": TORCHVISION_DATASETS,
    "ffmpeg.py": FFMPEG,
    "older_libraries.py": OLDER_LIBRARIES,
}
