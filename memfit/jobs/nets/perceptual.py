"""Distances between images as the layers of an image classifier see them, in their shapes, with random weights.

LPIPS: Zhang et al., https://arxiv.org/abs/1801.03924. VGG: Simonyan and Zisserman, https://arxiv.org/abs/1409.1556.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VGG16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
VGG19 = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))


def vgg(stages: Sequence[tuple[int, int]], *, width: float = 1.0) -> list[nn.Module]:
    """VGG's layers in order: convolutions with ReLU, a max pooling after every stage but the last."""
    layers: list[nn.Module] = []
    last = 3
    for stage, (count, channels) in enumerate(stages):
        for _ in range(count):
            layers += [nn.Conv2d(last, int(channels * width), 3, padding=1), nn.ReLU(inplace=True)]
            last = int(channels * width)
        if stage < len(stages) - 1:
            layers.append(nn.MaxPool2d(2))
    return layers


class _Slices(nn.Module):
    """Layers cut into slices after the given places; the outputs of all slices, for images in [-1, 1] or [0, 1]."""

    def __init__(self, layers: Sequence[nn.Module], cuts: Sequence[int]) -> None:
        super().__init__()
        starts = (0, *cuts[:-1])
        self.slices = nn.ModuleList(nn.Sequential(*layers[a:b]) for a, b in zip(starts, cuts, strict=True))

    def forward(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = []
        for part in self.slices:
            x = part(x)
            features.append(x)
        return features


class LpipsVgg(nn.Module):
    """The learned perceptual distance, by VGG16: images (n, 3, h, w) in [-1, 1] to (n, 1, 1, 1)."""

    shift: Tensor
    scale: Tensor

    def __init__(self, *, width: float = 1.0) -> None:
        super().__init__()
        self.net = _Slices(vgg(VGG16, width=width), (4, 9, 16, 23, 30))
        lins = [nn.Conv2d(int(c * width), 1, 1, bias=False) for _, c in VGG16]
        for lin in lins:
            nn.init.uniform_(lin.weight)
        self.lins = nn.ModuleList(lins)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188])[None, :, None, None])
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450])[None, :, None, None])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        pairs = zip(self._features(a), self._features(b), self.lins, strict=True)
        distances = [lin((x - y) ** 2).mean((2, 3), keepdim=True) for x, y, lin in pairs]
        total: Tensor = sum(distances[1:], start=distances[0])
        return total

    def _features(self, image: Tensor) -> list[Tensor]:
        return [_unit(f) for f in self.net((image - self.shift) / self.scale)]


def _unit(features: Tensor) -> Tensor:
    """Features (n, c, h, w) scaled to length 1 at every pixel."""
    return features / (features.pow(2).sum(1, keepdim=True).sqrt() + 1e-10)


class Vgg19Features(nn.Module):
    """relu1_1, 2_1, 3_1, 4_1 and 5_1 of VGG19 for images (n, 3, h, w); nothing deeper is built."""

    mean: nn.Parameter
    deviation: nn.Parameter

    def __init__(self, *, width: float = 1.0) -> None:
        super().__init__()
        self.net = _Slices(vgg(VGG19, width=width), (2, 7, 12, 21, 30))
        self.mean = nn.Parameter(torch.tensor([0.485, 0.456, 0.406])[None, :, None, None])
        self.deviation = nn.Parameter(torch.tensor([0.229, 0.224, 0.225])[None, :, None, None])

    def forward(self, image: Tensor) -> list[Tensor]:
        features: list[Tensor] = self.net((image - self.mean) / self.deviation)
        return features


class Pyramid(nn.Module):
    """The same images at several scales (1, 1/2, 1/4, 1/8), each blurred by a Gaussian before pixels are dropped."""

    def __init__(self, scales: Sequence[float] = (1.0, 0.5, 0.25, 0.125), channels: int = 3) -> None:
        super().__init__()
        self.steps = tuple(round(1 / scale) for scale in scales)
        for step in self.steps:
            self.register_buffer(f"kernel{step}", _gaussian((step - 1) / 2, channels))

    def forward(self, image: Tensor) -> list[Tensor]:
        """(n, c, h, w) to a list of (n, c, h/step, w/step)."""
        return [self._shrink(image, step) for step in self.steps]

    def _shrink(self, image: Tensor, step: int) -> Tensor:
        if step == 1:
            return image
        kernel = self.get_buffer(f"kernel{step}")
        blurred = F.conv2d(F.pad(image, (kernel.shape[-1] // 2,) * 4), kernel, groups=kernel.shape[0])
        return blurred[:, :, ::step, ::step]


def _gaussian(sigma: float, channels: int) -> Tensor:
    """(channels, 1, k, k): a normalised Gaussian, cut at four deviations."""
    reach = round(sigma * 4)
    line = torch.tensor([math.exp(-((i - reach) ** 2) / (2 * sigma**2 or 1)) for i in range(2 * reach + 1)])
    kernel = line[:, None] * line[None]
    return (kernel / kernel.sum()).repeat(channels, 1, 1, 1)
