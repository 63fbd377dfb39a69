"""What LatentSync's validation keeps in memory to judge a video: a face detector and a SyncNet.

S3FD: https://arxiv.org/abs/1708.05237, without its decoding of boxes (on the CPU, small). SyncNet: Chung and
Zisserman, Out of time, 2016. The layers are those of the papers; weights are random.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.jobs.nets.perceptual import VGG16, vgg


class FaceDetector(nn.Module):
    """Images (n, 3, h, w) to scores and boxes (n, 6, h', w') at six resolutions, from h/4 to h/128."""

    def __init__(self, *, width: float = 1.0) -> None:
        super().__init__()
        layers = vgg(VGG16, width=width)
        c3, c4, c5, fc, c6, c7 = (int(c * width) for c in (256, 512, 512, 1024, 512, 256))
        self.to_c3, self.to_c4 = nn.Sequential(*layers[:16]), nn.Sequential(*layers[16:23])
        self.to_c5 = nn.Sequential(*layers[23:30])
        self.to_fc7 = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(c5, fc, 3, padding=3), nn.ReLU(True), nn.Conv2d(fc, fc, 1), nn.ReLU(True)
        )
        self.to_c6, self.to_c7 = _squeeze(fc, c6), _squeeze(c6, c7)
        widths = (c3, c4, c5, fc, c6, c7)
        self.heads = nn.ModuleList(nn.Conv2d(c, 6 + 2 * (i == 0), 3, padding=1) for i, c in enumerate(widths))
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(c)) for c in (c3, c4, c5))

    def forward(self, image: Tensor) -> list[Tensor]:
        features, x = [], image
        for part in (self.to_c3, self.to_c4, self.to_c5, self.to_fc7, self.to_c6, self.to_c7):
            x = part(x)
            features.append(x)
        normed = [F.normalize(f, dim=1) * w[:, None, None] for f, w in zip(features[:3], self.norms, strict=True)]
        return [head(f) for head, f in zip(self.heads, [*normed, *features[3:]], strict=True)]


def _squeeze(channels: int, out_channels: int) -> nn.Sequential:
    inner = out_channels // 2
    return nn.Sequential(
        nn.Conv2d(channels, inner, 1),
        nn.ReLU(True),
        nn.Conv2d(inner, out_channels, 3, stride=2, padding=1),
        nn.ReLU(True),
    )


class SyncEvaluator(nn.Module):
    """Vectors (n, 1024) of five frames (n, 3, 5, 224, 224) and of their 20 mel-cepstral columns (n, 1, 13, 20)."""

    def __init__(self, *, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d, out = (int(w * width) for w in (64, 192, 384, 256, 512))
        self.hear_body = nn.Sequential(
            *_conv2(1, a),
            nn.MaxPool2d(1, 1),
            *_conv2(a, b),
            nn.MaxPool2d(3, (1, 2)),
            *_conv2(b, c),
            *_conv2(c, d),
            *_conv2(d, d),
            nn.MaxPool2d(3, 2),
            *_conv2(d, out, kernel=(5, 4), padding=0),
        )
        e, d = int(96 * width), int(256 * width)
        self.see_body = nn.Sequential(
            *_conv3(3, e, kernel=(5, 7, 7), stride=2, padding=0),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2)),
            *_conv3(e, d, kernel=(1, 5, 5), stride=2),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
            *_conv3(d, d),
            *_conv3(d, d),
            *_conv3(d, d),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2)),
            *_conv3(d, out, kernel=(1, 6, 6), padding=0),
        )
        self.hear_head, self.see_head = _head(out), _head(out)

    def see(self, frames: Tensor) -> Tensor:
        vectors: Tensor = self.see_head(self.see_body(frames).flatten(1))
        return vectors

    def hear(self, cepstra: Tensor) -> Tensor:
        vectors: Tensor = self.hear_head(self.hear_body(cepstra).flatten(1))
        return vectors


def _conv2(channels: int, out: int, kernel: int | tuple[int, int] = 3, padding: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, kernel, padding=padding), nn.BatchNorm2d(out), nn.ReLU(True)]


def _conv3(
    channels: int, out: int, *, kernel: tuple[int, int, int] = (1, 3, 3), stride: int = 1, padding: int = 1
) -> list[nn.Module]:
    strides, pads = (1, stride, stride), (0, padding, padding)
    return [nn.Conv3d(channels, out, kernel, stride=strides, padding=pads), nn.BatchNorm3d(out), nn.ReLU(True)]


def _head(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2 * width))
