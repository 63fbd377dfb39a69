"""StableSyncNet: do these 16 mouths and this sound belong together? https://arxiv.org/abs/2412.09262

Two encoders of strided residual blocks, down to one vector each, which are compared by their cosine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from memfit.jobs.nets.attention import Attention

VISUAL = (64, 128, 256, 256, 512, 1024, 2048, 2048)
VISUAL_STRIDES = ((1, 2), *[(2, 2)] * 7)
AUDIO = (32, 64, 128, 256, 512, 1024, 2048)
AUDIO_STRIDES = ((2, 1), (2, 2), (2, 2), (1, 1), (2, 2), (2, 2), (2, 3))


class StridedResnet(nn.Module):
    """Norm, SiLU, convolution, twice, a residual; then a strided convolution where the stride is not 1."""

    def __init__(self, channels: int, out_channels: int, *, stride: tuple[int, int], groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, eps=1e-6)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(channels, out_channels, 1) if channels != out_channels else None
        self.downsample = nn.Conv2d(out_channels, out_channels, 3, stride=stride) if stride != (1, 1) else None
        tall, wide = stride
        self.padding = (int(wide == 1), 1, int(tall == 1), 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        hidden = hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))
        return hidden if self.downsample is None else self.downsample(F.pad(hidden, self.padding))


class AttentionBlock(nn.Module):
    """Self-attention and a GEGLU feed-forward over all positions of a feature map, between two 1x1 convolutions."""

    def __init__(self, channels: int, *, groups: int, heads: int = 8) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, eps=1e-6)
        self.norm2, self.norm3 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.conv_in, self.conv_out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.attn = Attention(channels, heads=heads, bias=True)
        self.ff = FeedForward(channels, activation_fn="geglu")

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv_in(self.norm1(x)).flatten(2).transpose(1, 2)
        tokens = self.attn(self.norm2(tokens)) + tokens
        tokens = self.ff(self.norm3(tokens)) + tokens
        out: Tensor = self.conv_out(tokens.transpose(1, 2).unflatten(2, x.shape[2:])) + x
        return out


class DownEncoder(nn.Module):
    """(n, in_channels, h, w) to (n, last width); the strides must bring h and w down to 1."""

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        strides: Sequence[tuple[int, int]],
        *,
        attention_after: Sequence[int] = (),
        groups: int = 32,
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(in_channels, channels[0], 3, padding=1)
        self.down_blocks = nn.ModuleList()
        pairs = itertools.pairwise([channels[0], *channels])
        for index, ((width, out), stride) in enumerate(zip(pairs, strides, strict=True)):
            self.down_blocks.append(StridedResnet(width, out, stride=stride, groups=groups))
            if index in attention_after:
                self.down_blocks.append(AttentionBlock(out, groups=groups))
        self.norm_out = nn.GroupNorm(groups, channels[-1], eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return F.relu(self.norm_out(x)).flatten(1)


class SyncNet(nn.Module):
    """Unit vectors of the lower half of the frames (n, 3·frames, h/2, w) and of the mel (n, 1, 80, 52).

    Args:
        in_channels: 3 times the frames.
        attention: with the four attention blocks of LatentSync's; MuseTalk's has none.
    """

    def __init__(
        self,
        *,
        in_channels: int = 48,
        attention: bool = True,
        visual: Sequence[int] = VISUAL,
        visual_strides: Sequence[tuple[int, int]] = VISUAL_STRIDES,
        audio: Sequence[int] = AUDIO,
        groups: int = 32,
    ) -> None:
        super().__init__()
        places = ((3, 4), (4, 5)) if attention else ((), ())
        self.audio_encoder = DownEncoder(1, audio, AUDIO_STRIDES, attention_after=places[0], groups=groups)
        self.visual_encoder = DownEncoder(in_channels, visual, visual_strides, attention_after=places[1], groups=groups)

    def forward(self, frames: Tensor, mel: Tensor) -> tuple[Tensor, Tensor]:
        return self.see(frames), self.hear(mel)

    def see(self, frames: Tensor) -> Tensor:
        """(n, 3·frames, h/2, w) to (n, d), of length 1."""
        return F.normalize(self.visual_encoder(frames), dim=1)

    def hear(self, mel: Tensor) -> Tensor:
        """(n, 1, 80, 52) to (n, d), of length 1."""
        return F.normalize(self.audio_encoder(mel), dim=1)

    def recomputable(self) -> list[str]:
        """Paths of the blocks of both encoders."""
        return [
            f"{name}_encoder.down_blocks.{index}"
            for name, encoder in (("audio", self.audio_encoder), ("visual", self.visual_encoder))
            for index in range(len(encoder.down_blocks))
        ]


def sync_loss(seen: Tensor, heard: Tensor) -> Tensor:
    """Mean of -log of the cosine of two batches of vectors (n, d), in fp32; a cosine of 0 or less counts as 87.3."""
    cosine = F.cosine_similarity(seen.float(), heard.float())
    return -cosine.clamp(torch.finfo(torch.float32).tiny, 1.0).log().mean()
