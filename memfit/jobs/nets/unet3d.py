"""The Stable Diffusion 1.5 U-Net inflated over frames: convolutions see a frame, group norms all frames of a clip.

Rombach et al., https://arxiv.org/abs/2112.10752; inflation as in https://arxiv.org/abs/2307.04725.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import Tensor, nn

from memfit.jobs.nets.attention import SpatialTransformer
from memfit.jobs.nets.motion import MotionModule

Motion = Literal["none", "decoder", "all"]


class FrameConv2d(nn.Conv2d):
    """A 2-D convolution of (b, c, f, h, w), applied to (b·f, c, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, f, h, w = x.shape
        return super().forward(x.transpose(1, 2).reshape(b * f, c, h, w)).unflatten(0, (b, f)).transpose(1, 2)


class Resnet3D(nn.Module):
    """Norm, SiLU, convolution, twice, with the timestep embedding between, and a residual."""

    def __init__(self, channels: int, out_channels: int, *, time_dim: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = FrameConv2d(channels, out_channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(time_dim, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = FrameConv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = FrameConv2d(channels, out_channels, 1) if channels != out_channels else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x (b, c, f, h, w), time (b, time_dim)."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time_emb_proj(F.silu(time))[:, :, None, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Stage(nn.Module):
    """The resnets of one resolution, each followed by its attention and its motion module where there are any."""

    def __init__(
        self,
        widths: Sequence[tuple[int, int]],
        *,
        time_dim: int,
        context_dim: int,
        heads: int,
        groups: int,
        attends: bool,
        moves: bool,
    ) -> None:
        super().__init__()
        outs = [out for _, out in widths]
        self.resnets = nn.ModuleList(Resnet3D(c, out, time_dim=time_dim, groups=groups) for c, out in widths)
        self.attentions = nn.ModuleList(
            SpatialTransformer(c, heads=heads, context_dim=context_dim, groups=groups) for c in outs if attends
        )
        self.motion_modules = nn.ModuleList(MotionModule(c, heads=heads, groups=groups) for c in outs if moves)

    def step(self, index: int, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        """The output of layer ``index``: (b, c, f, h, w)."""
        x = self.resnets[index](x, time)
        if self.attentions:
            x = self.attentions[index](x, context)
        if self.motion_modules:
            x = self.motion_modules[index](x)
        return x


class Down(Stage):
    """A stage of the encoder, and the strided convolution after it (none in the last)."""

    def __init__(self, widths: Sequence[tuple[int, int]], *, last: bool, **shared: Any) -> None:
        super().__init__(widths, **shared)
        width = widths[-1][1]
        self.downsampler = None if last else FrameConv2d(width, width, 3, stride=2, padding=1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> list[Tensor]:
        """Every layer's output, the next stage's input last."""
        outputs: list[Tensor] = []
        for index in range(len(self.resnets)):
            x = self.step(index, x, time, context)
            outputs.append(x)
        return [*outputs, self.downsampler(x)] if self.downsampler is not None else outputs


class Up(Stage):
    """A stage of the decoder: every layer reads a skip, and an upsampled convolution follows (none in the last)."""

    def __init__(self, widths: Sequence[tuple[int, int]], *, last: bool, **shared: Any) -> None:
        super().__init__(widths, **shared)
        width = widths[-1][1]
        self.upsampler = None if last else FrameConv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor, skips: list[Tensor]) -> Tensor:
        for index in range(len(self.resnets)):
            x = self.step(index, torch.cat([x, skips.pop()], dim=1), time, context)
        if self.upsampler is not None:
            x = self.upsampler(F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest"))
        return x


class Middle(nn.Module):
    """A resnet, an attention, a resnet."""

    def __init__(self, channels: int, *, time_dim: int, context_dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Resnet3D(channels, channels, time_dim=time_dim, groups=groups) for _ in range(2))
        self.attentions = nn.ModuleList(
            [SpatialTransformer(channels, heads=heads, context_dim=context_dim, groups=groups)]
        )

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        out: Tensor = self.resnets[1](self.attentions[0](self.resnets[0](x, time), context), time)
        return out


class UNet3D(nn.Module):
    """Predicts the noise of every frame's latent.

    Args:
        channels: width at each resolution; every stage but the last has attention.
        layers: resnets of an encoder stage; a decoder stage has one more.
        context_dim: width of the audio embeddings.
        motion: where motion modules are: nowhere, in the decoder's stages, or in those of both sides.
    """

    def __init__(
        self,
        *,
        in_channels: int = 13,
        out_channels: int = 4,
        channels: Sequence[int] = (320, 640, 1280, 1280),
        layers: int = 2,
        heads: int = 8,
        context_dim: int = 384,
        groups: int = 32,
        motion: Motion = "none",
    ) -> None:
        super().__init__()
        first, last, time_dim = channels[0], len(channels) - 1, 4 * channels[0]
        shared = {"time_dim": time_dim, "context_dim": context_dim, "heads": heads, "groups": groups}
        self.time_proj = Timesteps(first, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedding = TimestepEmbedding(first, time_dim)
        self.conv_in = FrameConv2d(in_channels, first, 3, padding=1)
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        skips, width = [first], first
        for level, out in enumerate(channels):
            widths = [(width, out), *[(out, out)] * (layers - 1)]
            down = Down(widths, last=level == last, attends=level < last, moves=motion == "all", **shared)
            self.down_blocks.append(down)
            skips += [out] * (layers + (level < last))
            width = out
        self.mid_block = Middle(width, **shared)
        for level, out in reversed(list(enumerate(channels))):
            ins = [width, *[out] * layers]
            widths = [(c + skips.pop(), out) for c in ins]
            up = Up(widths, last=level == 0, attends=level < last, moves=motion != "none", **shared)
            self.up_blocks.append(up)
            width = out
        self.conv_norm_out = nn.GroupNorm(groups, first)
        self.conv_out = FrameConv2d(first, out_channels, 3, padding=1)

    def forward(self, sample: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        """sample (b, in, f, h, w), timesteps (b,), context (b, f, t, context_dim) to (b, out, f, h, w)."""
        time = self.time_embedding(self.time_proj(timesteps).to(self.conv_in.weight.dtype))
        x = self.conv_in(sample)
        skips = [x]
        for down in self.down_blocks:
            skips += down(skips[-1], time, context)
        x = self.mid_block(skips[-1], time, context)
        for up in self.up_blocks:
            x = up(x, time, context, skips)
        out: Tensor = self.conv_out(F.silu(self.conv_norm_out(x)))
        return out

    def recomputable(self) -> list[str]:
        """Paths of the resnets, attentions and motion modules of the encoder and decoder stages."""
        stages = itertools.chain(
            ((f"down_blocks.{i}", stage) for i, stage in enumerate(self.down_blocks)),
            ((f"up_blocks.{i}", stage) for i, stage in enumerate(self.up_blocks)),
        )
        return [
            f"{path}.{kind}.{index}"
            for path, stage in stages
            for kind in ("resnets", "attentions", "motion_modules")
            for index in range(len(getattr(stage, kind)))
        ]
