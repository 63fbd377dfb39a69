"""HiFi-GAN (Kong et al. 2020): a generator from frames to a waveform, and discriminators of periods and of scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.jobs.nets.weight_norm import weight_norm

SLOPE = 0.1
Judgement = tuple[Tensor, list[Tensor]]
"""Scores (b, n), and the feature maps of every layer."""


class ResidualBlock(nn.Module):
    """Three pairs of convolutions, the first of each dilated by 1, 3 and 5."""

    def __init__(self, channels: int, kernel: int, start: float) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(_conv(channels, kernel, dilation, start) for dilation in (1, 3, 5))
        self.plain = nn.ModuleList(_conv(channels, kernel, 1, start) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            x = plain(F.leaky_relu(dilated(F.leaky_relu(x, SLOPE)), SLOPE)) + x
        return x


def _conv(channels: int, kernel: int, dilation: int, start: float) -> nn.Conv1d:
    layer = nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)
    nn.init.normal_(layer.weight, 0.0, start)
    return weight_norm(layer)


class WaveGenerator(nn.Module):
    """(b, c, t) frames to (b, 1, t x product of rates) samples in -1 to 1; each stage halves the channels.

    ``start``: standard deviation of the first weights.
    """

    def __init__(
        self, channels: int, initial: int, rates: Sequence[int], kernels: Sequence[int], condition: int, start: float
    ) -> None:
        super().__init__()
        self.pre = nn.Conv1d(channels, initial, 7, padding=3)
        self.condition = nn.Conv1d(condition, initial, 1)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for stage, (rate, kernel) in enumerate(zip(rates, kernels, strict=True)):
            wide, narrow = initial >> stage, initial >> (stage + 1)
            up = nn.ConvTranspose1d(wide, narrow, kernel, rate, padding=(kernel - rate) // 2)
            nn.init.normal_(up.weight, 0.0, start)
            self.ups.append(weight_norm(up))
            self.resblocks.extend(ResidualBlock(narrow, kernel, start) for kernel in (3, 7, 11))
        self.post = nn.Conv1d(initial >> len(rates), 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.pre(x)
        x = x + self.condition(condition)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, SLOPE))
            first, second, third = self.resblocks[3 * stage : 3 * stage + 3]
            total = first(x)
            total += second(x)
            total += third(x)
            x = total / 3
        return self.post(F.leaky_relu(x)).tanh()


class PeriodDiscriminator(nn.Module):
    """Judges a waveform folded into columns of one period."""

    def __init__(self, period: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.period = period
        strides = [3] * (len(channels) - 1) + [1]
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(narrow, wide, (5, 1), (stride, 1), padding=(2, 0)))
            for narrow, wide, stride in zip((1, *channels), channels, strides, strict=False)
        )
        self.post = weight_norm(nn.Conv2d(channels[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> Judgement:
        missing = -wave.shape[-1] % self.period
        if missing:
            wave = F.pad(wave, (0, missing), mode="reflect")
        return _judge(self.layers, self.post, wave.unflatten(-1, (-1, self.period)))


class ScaleDiscriminator(nn.Module):
    """Judges a waveform through grouped convolutions of 41 samples."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        layers = (
            nn.Conv1d(1, w, 15, padding=7),
            nn.Conv1d(w, 4 * w, 41, 4, groups=max(1, w // 4), padding=20),
            nn.Conv1d(4 * w, 16 * w, 41, 4, groups=w, padding=20),
            nn.Conv1d(16 * w, 64 * w, 41, 4, groups=4 * w, padding=20),
            nn.Conv1d(64 * w, 64 * w, 41, 4, groups=16 * w, padding=20),
            nn.Conv1d(64 * w, 64 * w, 5, padding=2),
        )
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)
        self.post = weight_norm(nn.Conv1d(64 * w, 1, 3, padding=1))

    def forward(self, wave: Tensor) -> Judgement:
        return _judge(self.layers, self.post, wave)


def _judge(layers: nn.ModuleList, post: nn.Module, x: Tensor) -> Judgement:
    features = []
    for layer in layers:
        x = F.leaky_relu(layer(x), SLOPE)
        features.append(x)
    x = post(x)
    features.append(x)
    return torch.flatten(x, 1), features


class WaveformDiscriminator(nn.Module):
    """A scale discriminator and one for each period; each sees the real waveform, then the made one."""

    def __init__(self, periods: Sequence[int], width: int = 16) -> None:
        super().__init__()
        channels = [2 * width, 8 * width, 32 * width, 64 * width, 64 * width]
        self.parts = nn.ModuleList(
            [ScaleDiscriminator(width), *(PeriodDiscriminator(period, channels) for period in periods)]
        )

    def forward(self, real: Tensor, made: Tensor) -> list[tuple[Judgement, Judgement]]:
        return [(part(real), part(made)) for part in self.parts]
