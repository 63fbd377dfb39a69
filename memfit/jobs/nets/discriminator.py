"""A patch discriminator with spectral norm, one for each scale of an image pyramid.

Isola et al., https://arxiv.org/abs/1611.07004; Miyato et al., https://arxiv.org/abs/1802.05957.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm


class DownBlock(nn.Module):
    """A 4x4 convolution, an instance norm, a leaky ReLU and an average pooling."""

    def __init__(self, channels: int, out_channels: int, *, norm: bool, pool: bool) -> None:
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(channels, out_channels, 4))
        self.norm = nn.InstanceNorm2d(out_channels, affine=True) if norm else None
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = F.leaky_relu(x if self.norm is None else self.norm(x), 0.2)
        return F.avg_pool2d(x, 2) if self.pool else x


class PatchDiscriminator(nn.Module):
    """Images (n, 3, h, w) to a map of scores (n, 1, h', w'), and the features of every block on the way."""

    def __init__(self, *, width: int = 64, blocks: int = 4, widest: int = 512) -> None:
        super().__init__()
        widths = [min(widest, width * 2**i) for i in range(blocks)]
        self.down_blocks = nn.ModuleList(
            DownBlock(c, out, norm=i > 0, pool=i < blocks - 1)
            for i, (c, out) in enumerate(zip([3, *widths[:-1]], widths, strict=True))
        )
        self.conv = spectral_norm(nn.Conv2d(widths[-1], 1, 1))

    def forward(self, image: Tensor) -> tuple[list[Tensor], Tensor]:
        features = [image]
        for block in self.down_blocks:
            features.append(block(features[-1]))
        return features[1:], self.conv(features[-1])


class MultiScaleDiscriminator(nn.Module):
    """A discriminator for each of the first ``scales`` levels of a pyramid (MuseTalk: 1)."""

    def __init__(self, *, scales: int = 1, width: int = 64) -> None:
        super().__init__()
        self.discs = nn.ModuleList(PatchDiscriminator(width=width) for _ in range(scales))

    def forward(self, pyramid: list[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
        """Features and scores of every scale; the pyramid may hold more levels than are judged."""
        return [disc(image) for disc, image in zip(self.discs, pyramid, strict=False)]


def discriminator_loss(net: MultiScaleDiscriminator, real: list[Tensor], made: list[Tensor]) -> Tensor:
    """Least squares: real images should score 1, made ones 0; the mean over scores, summed over scales."""
    scores = zip(net(made), net(real), strict=True)
    total: Tensor = sum(((1 - r) ** 2 + m**2).mean() for (_, m), (_, r) in scores)
    return total


def generator_loss(net: MultiScaleDiscriminator, real: list[Tensor], made: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(Least squares: made images should score 1; mean distance of the blocks' features), summed over scales."""
    fooled, matched = [], []
    judged = net(made)
    for (made_features, score), (real_features, _) in zip(judged, net(real), strict=True):
        fooled.append(((1 - score) ** 2).mean())
        matched += [(a - b).abs().mean() for a, b in zip(real_features, made_features, strict=True)]
    return sum(fooled[1:], start=fooled[0]), sum(matched[1:], start=matched[0])
