"""MuseTalk: a U-Net paints the mouth of an image after the sound in a single step, judged in pixels.

https://arxiv.org/abs/2410.10122. The gradient comes back through the frozen VAE's decoder, which keeps more for it than
all else. Stage 1: single images, L1 and VGG. Stage 2: clips of 16 frames, two discriminators and a SyncNet besides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.errors import InputError
from memfit.job import Job, Loss, Nets, Precision, Shape, Turn
from memfit.jobs.data import frames as video
from memfit.jobs.nets.discriminator import MultiScaleDiscriminator, discriminator_loss, generator_loss
from memfit.jobs.nets.frozen import (
    audio_embeddings,
    decode_latents,
    encode_images,
    frozen,
    hidden_states,
    sd_vae,
    whisper,
)
from memfit.jobs.nets.perceptual import Pyramid, Vgg19Features
from memfit.jobs.nets.syncnet import SyncNet, sync_loss
from memfit.jobs.upstream import MUSETALK, Upstream


class MuseTalkStage1(Job):
    """Stage 1: single images at 256². A sample is a clip of ``frames`` images, here one."""

    precision: Precision = "fp32"
    autocasts_itself: ClassVar[bool] = True
    """Where there is autocast, it is around the U-Net alone, as Accelerate puts it around the net it prepares."""
    checkpoint: str = "all"
    clip: float | None = 1.0

    frames: int = 1
    resolution: int = 256
    optimizer: Literal["foreach", "fused"] = "foreach"
    learning_rate: float = 2e-5
    critic_learning_rate: float = 5e-6
    l1_weight: float = 1.0
    vgg_weight: float = 0.01
    gan_weight: float = 0.0
    mouth_gan_weight: float = 0.0
    feature_weight: float = 1.0
    """Of the distance between the discriminators' features, where there are discriminators."""
    sync_weight: float = 0.0
    clips: int = 64
    """Clips of drawn talking faces in the data set."""

    net_shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Arguments of the nets by name, where they are not the published ones."""
    sync_size: ClassVar[tuple[int, int]] = (128, 256)
    """Height and width that the SyncNet sees."""
    judged_size: ClassVar[int] = 224
    """Height and width of the largest images that VGG and, in the generator's turn, the discriminators see."""
    smaller_settings: ClassVar[Mapping[str, str]] = {"resolution": "smaller faces", "frames": "shorter clips"}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(("frames", "clips"), (1, math.inf)),
        **dict.fromkeys(("learning_rate", "critic_learning_rate", "l1_weight", "vgg_weight"), (0, math.inf)),
        **dict.fromkeys(("gan_weight", "mouth_gan_weight", "feature_weight", "sync_weight"), (0, math.inf)),
    }
    unsynchronised: ClassVar[tuple[str, ...]] = ("discriminator", "mouth_discriminator")
    """Nets that every rank of upstream trains by itself."""
    upstream: ClassVar[Upstream] = MUSETALK

    # ---- nets

    def nets(self) -> Nets:
        if self.resolution < 64 or self.resolution % 64:
            why = "the VAE and the U-Net halve it six times"
            raise InputError(f"resolution={self.resolution}", why, "write a multiple of 64")
        unet: Any = UNet2DConditionModel(**{**UNET, **self._shape("unet")})
        nets: Nets = {
            "unet": unet,
            "vae": frozen(sd_vae(**self._shape("vae"))),
            "whisper": frozen(whisper(**self._shape("whisper"))),
        }
        if self._looks:
            nets["pyramid"] = frozen(Pyramid())
        if self.vgg_weight:
            nets["vgg"] = frozen(Vgg19Features(**self._shape("vgg")))
        if self.gan_weight:
            nets["discriminator"] = MultiScaleDiscriminator(**self._shape("discriminator"))
        if self.mouth_gan_weight:
            nets["mouth_discriminator"] = MultiScaleDiscriminator(**self._shape("discriminator"))
        if self.sync_weight:
            shape = {"in_channels": 3 * self.frames, "attention": False} | dict(self._shape("syncnet"))
            nets["syncnet"] = frozen(SyncNet(**shape))
        return nets

    def _shape(self, net: str) -> Mapping[str, Any]:
        return self.net_shapes.get(net, {})

    @property
    def _looks(self) -> bool:
        return bool(self.vgg_weight or self.gan_weight or self.mouth_gan_weight)

    def optimizers(self, nets: Nets) -> dict[str, Optimizer]:
        kind: dict[str, bool] = {self.optimizer: True}
        rates = {"unet": self.learning_rate} | dict.fromkeys(CRITICS, self.critic_learning_rate)
        return {
            name: torch.optim.AdamW(nets[name].parameters(), lr=rate, betas=(0.5, 0.999), **kind)
            for name, rate in rates.items()
            if name in nets
        }

    def checkpointable(self, nets: Nets) -> list[str]:
        """What diffusers recomputes of a U-Net: resnets and transformer blocks, but not the mid block's first."""
        blocks = _paths(nets["unet"], "unet", ("ResnetBlock2D", "BasicTransformerBlock"))
        return [path for path in blocks if path != "unet.mid_block.resnets.0"]

    def also_checkpointable(self, nets: Nets) -> list[str]:
        """What upstream keeps and could recompute: above all the VAE's decoder."""
        named: dict[str, Any] = nets
        paths = _paths(named["vae"].decoder, "vae.decoder", ("ResnetBlock2D", "Attention", "Upsample2D"))
        paths.append("unet.mid_block.resnets.0")
        if "vgg" in named:
            paths += [f"vgg.net.slices.{index}" for index in range(len(named["vgg"].net.slices))]
        if "syncnet" in named:
            paths += [f"syncnet.{path}" for path in named["syncnet"].recomputable()]
        return paths

    # ---- a step

    def batch(self, shape: Shape) -> dict[str, Any]:
        """Made-up clips: pixels (b, f, 3, r, r) their sound, boxes (b, f, 4) around the mouths."""
        side = self.resolution
        batch: dict[str, Any] = {
            "pixels": torch.rand(shape.items, self.frames, 3, side, side) * 2 - 1,
            "reference": torch.rand(shape.items, self.frames, 3, side, side) * 2 - 1,
            "audio": torch.randn(shape.items, 80, 3000),
            "positions": torch.randint(0, 1500, (shape.items, self.frames, video.POSITIONS)),
        }
        if self.sync_weight:
            batch["mel"] = torch.randn(shape.items, 1, 80, video.MEL_COLUMNS)
        if self.mouth_gan_weight:
            batch["mouths"] = torch.tensor(MOUTH).expand(shape.items, self.frames, 4).contiguous()
        return batch

    def turns(self, optimizers: Sequence[str]) -> list[Turn]:
        """The U-Net's turn, then each discriminator's, which judges the images that the first turn painted."""
        losses: dict[str, Any] = {
            "unet": self._generator,
            "discriminator": self._discriminator,
            "mouth_discriminator": self._mouths_loss,
        }
        return [Turn(name=TURNS.get(name, name), loss=losses[name], optimizers=(name,)) for name in optimizers]

    def units(self, batch: Any) -> int:
        return int(batch["pixels"].shape[0])

    def paint(self, nets: Nets, batch: Any, guide: Tensor | None = None) -> Tensor:
        """Images (b·f, 3, r, r), lower halves painted after the sound; ``guide`` gives other upper halves."""
        vae: Any = nets["vae"]
        with torch.no_grad():
            states = hidden_states(nets["whisper"].encoder, batch["audio"])  # type: ignore[arg-type]
            audio = audio_embeddings(states, batch["positions"]).flatten(0, 1)
            del states
            masked = (batch["pixels"] if guide is None else guide).clone()
            masked[..., self.resolution // 2 :, :] = -1
            seen = torch.cat(
                [encode_images(vae, images.flatten(0, 1)) for images in (masked, batch["reference"])], dim=1
            )
            del masked
        with self.autocast(seen.device):
            latents = nets["unet"](seen, torch.zeros(1, dtype=torch.long, device=seen.device), audio).sample
        return decode_latents(vae, latents.float())

    def _generator(self, nets: Nets, batch: Any, shared: dict[str, Any]) -> dict[str, Loss]:
        clips = batch["pixels"].shape[0]
        real, made = batch["pixels"].flatten(0, 1), self.paint(nets, batch)
        shared["real"], shared["made"] = real, made.detach()
        losses = {"l1": F.l1_loss(real, made) * self.l1_weight}
        if self.mouth_gan_weight:
            real_mouths, made_mouths = self._mouths(real, batch), self._mouths(made, batch)
            shared["real_mouths"], shared["made_mouths"] = real_mouths, made_mouths.detach()
        if self._looks:
            pair = self._pyramid(nets, real), self._pyramid(nets, made)
        if self.vgg_weight:
            losses["vgg"] = self._vgg(nets["vgg"], *pair) * self.vgg_weight
        if self.gan_weight:
            losses |= self._fool(nets["discriminator"], "", *pair)
        if self.mouth_gan_weight:
            mouths = self._pyramid(nets, real_mouths), self._pyramid(nets, made_mouths)
            losses |= self._fool(nets["mouth_discriminator"], "mouth_", *mouths)
        if self.sync_weight:
            net: Any = nets["syncnet"]
            lower = made.unflatten(0, (clips, -1)).flatten(1, 2)[:, :, self.resolution // 2 :]
            if lower.shape[-2:] != self.sync_size:
                lower = F.interpolate(lower, size=self.sync_size, mode="bilinear")
            losses["sync"] = sync_loss(net.see(lower), net.hear(batch["mel"])) * self.sync_weight
        return {name: Loss(value * clips, clips) for name, value in losses.items()}

    def _pyramid(self, nets: Nets, images: Tensor) -> list[Tensor]:
        small = F.interpolate(images, size=(self.judged_size, self.judged_size), mode="bilinear", align_corners=False)
        levels: list[Tensor] = nets["pyramid"](small)
        return levels

    def _vgg(self, net: nn.Module, real: list[Tensor], made: list[Tensor]) -> Tensor:
        """The mean over the five slices of VGG of the features' mean distance, summed over the pyramid's levels."""
        levels = zip(made, real, strict=True)
        distances = [(a - b).abs().mean() for m, r in levels for a, b in zip(net(m), net(r), strict=True)]
        return sum(distances[1:], start=distances[0]) / 5

    def _fool(self, net: nn.Module, prefix: str, real: list[Tensor], made: list[Tensor]) -> dict[str, Tensor]:
        with _no_parameter_gradients(net):
            fooled, matched = generator_loss(net, real, made)  # type: ignore[arg-type]
        weight = self.mouth_gan_weight if prefix else self.gan_weight
        return {f"{prefix}gan": fooled * weight, f"{prefix}features": matched * self.feature_weight}

    def _mouths(self, images: Tensor, batch: Any) -> Tensor:
        """Every image's mouth, enlarged to the image's own size: (n, 3, r, r)."""
        top, bottom, left, right = batch["mouths"].flatten(0, 1).T
        zero = torch.zeros_like(top)
        across, down = [right - left, zero, left + right - 1], [zero, bottom - top, top + bottom - 1]
        zoom = torch.stack([torch.stack(across, 1), torch.stack(down, 1)], 1)
        where = F.affine_grid(zoom, list(images.shape), align_corners=False)
        return F.grid_sample(images, where, padding_mode="border", align_corners=False)

    def _discriminator(self, nets: Nets, batch: Any, shared: dict[str, Any]) -> Loss:
        self._repaint(nets, batch, shared)
        return self._judged(nets["discriminator"], batch, shared["real"], shared["made"])

    def _mouths_loss(self, nets: Nets, batch: Any, shared: dict[str, Any]) -> Loss:
        self._repaint(nets, batch, shared)
        return self._judged(nets["mouth_discriminator"], batch, shared["real_mouths"], shared["made_mouths"])

    def _judged(self, net: nn.Module, batch: Any, real: Tensor, made: Tensor) -> Loss:
        clips = batch["pixels"].shape[0]
        return Loss(discriminator_loss(net, [real], [made]) * clips, clips)  # type: ignore[arg-type]

    def _repaint(self, nets: Nets, batch: Any, shared: dict[str, Any]) -> None:
        """Paints the images once more where the generator's turn of another micro-batch came between."""
        if "made" in shared:
            return
        with torch.no_grad():
            shared["real"], shared["made"] = batch["pixels"].flatten(0, 1), self.paint(nets, batch)
            if self.mouth_gan_weight:
                for name in ("real", "made"):
                    shared[f"{name}_mouths"] = self._mouths(shared[name], batch)

    # ---- validation

    def validate(self, nets: Nets, batch: Any) -> Mapping[str, Tensor]:
        """A training batch painted twice: with its own upper halves, and with the reference's, as inference does."""
        real = batch["pixels"].flatten(0, 1)
        as_trained = self.paint(nets, batch)
        as_used = self.paint(nets, batch, batch["reference"])
        return {"l1": F.l1_loss(as_trained, real), "l1_inference": F.l1_loss(as_used, real)}

    # ---- data

    def dataset(self) -> Sequence[video.TalkingClip]:
        return video.talking_clips(self.clips, self.frames, self.resolution)

    def validation_dataset(self) -> Sequence[video.TalkingClip]:
        """Clips of faces that no training clip shows."""
        return video.talking_clips(min(self.clips, 8), self.frames, self.resolution, seed=1)

    def collate(self, samples: Sequence[video.TalkingClip]) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "pixels": video.stacked(clip.frames for clip in samples) / 127.5 - 1,
            "reference": video.stacked(clip.reference for clip in samples) / 127.5 - 1,
            "audio": video.stacked(video.whisper_mel(clip.wave) for clip in samples),
            "positions": video.stacked(video.whisper_positions(clip.start, self.frames) for clip in samples),
        }
        if self.sync_weight:
            batch["mel"] = video.stacked(video.sync_mel(clip.wave, clip.start) for clip in samples)
        if self.mouth_gan_weight:
            batch["mouths"] = torch.tensor(MOUTH).expand(len(samples), self.frames, 4).contiguous()
        return batch


class MuseTalkStage2(MuseTalkStage1):
    """Stage 2: clips of 16 frames, with a discriminator of the image, one of the mouth, and a SyncNet."""

    frames: int = 16
    learning_rate: float = 5e-6
    gan_weight: float = 0.01
    mouth_gan_weight: float = 0.01
    sync_weight: float = 0.05


class MuseTalkTiny(MuseTalkStage2):
    """Stage 2's code at 64 px with narrow nets and clips of 2 frames, on drawn faces that talk."""

    frames: int = 2
    resolution: int = 64
    learning_rate: float = 1e-3
    critic_learning_rate: float = 5e-4
    feature_weight: float = 0.03
    clips: int = 16

    judged_size: ClassVar[int] = 128
    sync_size: ClassVar[tuple[int, int]] = (32, 64)
    net_shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "unet": {
            "block_out_channels": (32, 32, 64, 64),
            "layers_per_block": 1,
            "attention_head_dim": 4,
            "cross_attention_dim": 32,
            "norm_num_groups": 8,
        },
        "vae": {"channels": (8, 16, 16, 16), "groups": 1},
        "whisper": {"dim": 32, "heads": 2},
        "vgg": {"width": 0.125},
        "discriminator": {"width": 8},
        "syncnet": {
            "visual": (8, 16, 32, 32, 32, 64),
            "visual_strides": ((1, 2), *[(2, 2)] * 5),
            "audio": (8, 16, 16, 32, 32, 32, 64),
            "groups": 8,
        },
    }


UNET = {"sample_size": 32, "in_channels": 8, "out_channels": 4, "cross_attention_dim": 384, "attention_head_dim": 8}
"""diffusers calls the number of heads ``attention_head_dim`` here; the rest is its default, Stable Diffusion's."""
CRITICS = ("discriminator", "mouth_discriminator")
TURNS = {"unet": "generator"}
MOUTH = (0.5625, 0.9375, 0.25, 0.75)
"""Top, bottom, left and right of the mouth of a centred face, of the image's height and width."""


def _paths(net: nn.Module, name: str, kinds: Sequence[str]) -> list[str]:
    """Paths of the modules whose class has one of these names."""
    return [f"{name}.{path}" for path, module in net.named_modules() if type(module).__name__ in kinds]


@contextlib.contextmanager
def _no_parameter_gradients(net: nn.Module) -> Iterator[None]:
    """Inside, gradients pass through the net and none is made for its own parameters."""
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in net.parameters():
            parameter.requires_grad_(True)
