"""LatentSync: a latent diffusion U-Net paints the mouth of 16 video frames after the sound. https://arxiv.org/abs/2412.09262

Stage 1 learns the noise alone. Stage 2 adds motion modules, and judges the decoded frames: one step back to the clean
latents, the VAE's decoder, then a SyncNet, LPIPS and the features of a video classifier (TREPA).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.errors import InputError
from memfit.job import Job, Loss, Nets, Precision, Shape
from memfit.jobs.data import frames as video
from memfit.jobs.nets.diffusion import ddim, one_step
from memfit.jobs.nets.evaluators import FaceDetector, SyncEvaluator
from memfit.jobs.nets.frozen import (
    audio_embeddings,
    decode_latents,
    encode_images,
    frozen,
    hidden_states,
    openai_whisper,
    sd_vae,
)
from memfit.jobs.nets.latentsync_inference import judge, lip_sync
from memfit.jobs.nets.perceptual import LpipsVgg
from memfit.jobs.nets.syncnet import SyncNet, sync_loss
from memfit.jobs.nets.unet3d import Motion, UNet3D
from memfit.jobs.nets.videomae import VideoMae, trepa_loss
from memfit.jobs.upstream import LATENTSYNC, Upstream

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LatentSyncStage1(Job):
    """Stage 1 at 256 px: every weight of the U-Net learns to predict the noise. A sample is a clip of 16 frames."""

    precision: Precision = "fp16"
    autocasts_itself: ClassVar[bool] = True
    """Autocast is around the U-Net's call alone."""
    checkpoint: str = "all"
    clip: float | None = 1.0
    zero_grad: Literal["after_step", "after_forward"] = "after_forward"
    wrapper: Literal["none", "ddp"] = "ddp"

    frames: int = 16
    resolution: int = 256
    motion: Motion = "none"
    """Where motion modules are: none, decoder, all."""
    trained: Literal["all", "motion+attentions", "motion+attn2"] = "all"
    """Which parameters of the U-Net learn."""
    frozen_precision: Precision = "fp16"
    """Weights of the VAE, the SyncNet and TREPA's net."""
    optimizer: Literal["foreach", "fused"] = "foreach"
    learning_rate: float = 1e-5
    mixed_noise: bool = True
    """Noise with a part that all frames of a clip share; False: all of it is shared."""
    draws: Literal["step", "sample"] = "step"
    """Where noise and timesteps come from: the step (upstream), or each sample's own seed, so that a window learns the
    same however it is split."""
    pixel_space_supervise: bool = False
    recon_weight: float = 1.0
    sync_weight: float = 0.0
    perceptual_weight: float = 0.0
    trepa_weight: float = 0.0
    validation_frames: int = 250
    """Length of the validation video, 25 a second."""
    validation_keeps: Literal["device", "host"] = "device"
    """Where the faces and the decoded frames of the whole validation video wait."""
    validation_decode: int = 16
    """Frames that the VAE decodes at once in validation."""
    validation_judge: int = 20
    """Clips of 5 frames that the evaluator of lips and sound sees at once in validation."""
    inference_steps: int = 20
    guidance: float = 1.5
    validate_every: int = 10_000
    clips: int = 64
    """Clips of drawn talking faces in the data set."""

    validation_smaller: ClassVar[Mapping[str, Any]] = {
        "validation_keeps": "host",
        "validation_decode": 1,
        "validation_judge": 1,
    }
    net_shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Arguments of the nets by name, where they are not the published ones."""
    sync_size: ClassVar[tuple[int, int]] = (128, 256)
    """Height and width that the SyncNet sees."""
    detector_size: ClassVar[tuple[int, int]] = (180, 320)
    """A validation frame as the face detector sees it: 720p at a quarter."""
    validation_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sliced decode in validation": {"validation_decode": 1},
        "validation frames on the host": {"validation_keeps": "host"},
        "sliced judging in validation": {"validation_judge": 1},
    }
    smaller_settings: ClassVar[Mapping[str, str]] = {
        "resolution": "smaller faces",
        "frames": "shorter clips",
        "trained": "fewer weights learn",
    }
    net_phases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "detector": ("validate",),
        "evaluator": ("validate",),
        "syncnet": ("train",),
        "lpips": ("train",),
        "trepa": ("train",),
    }
    """The phases that use a net which others do not; all nets are resident all the time."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(
            ("frames", "clips", "validation_frames", "validation_decode", "inference_steps"), (1, math.inf)
        ),
        **dict.fromkeys(("recon_weight", "sync_weight", "perceptual_weight", "trepa_weight"), (0, math.inf)),
        **dict.fromkeys(("learning_rate", "guidance", "validation_judge"), (0, math.inf)),
    }
    upstream: ClassVar[Upstream] = LATENTSYNC

    # ---- nets

    def nets(self) -> Nets:
        self._check()
        dtype = DTYPES[self.frozen_precision]
        unet = UNet3D(motion=self.motion, **self._shape("unet"))
        _choose_trained(unet, self.trained)
        nets: Nets = {
            "unet": unet,
            "vae": frozen(sd_vae(**self._shape("vae")), dtype),
            "whisper": frozen(openai_whisper(**self._shape("whisper"))),
            "detector": frozen(FaceDetector(**self._shape("detector"))),
            "evaluator": frozen(SyncEvaluator(**self._shape("evaluator"))),
        }
        if self.pixel_space_supervise and self.sync_weight:
            nets["syncnet"] = frozen(SyncNet(in_channels=3 * self.frames, **self._shape("syncnet")), dtype)
        if self.pixel_space_supervise and self.perceptual_weight:
            nets["lpips"] = frozen(LpipsVgg(**self._shape("lpips")))
        if self.pixel_space_supervise and self.trepa_weight:
            nets["trepa"] = frozen(VideoMae(frames=self.frames, **self._shape("trepa")), dtype)
        return nets

    def _shape(self, net: str) -> Mapping[str, Any]:
        return self.net_shapes.get(net, {})

    def _check(self) -> None:
        if self.motion != "none" and not 1 <= self.frames <= 24:
            raise InputError(f"frames={self.frames}", "motion modules know 24 positions", "write frames=1 to 24")
        if self.pixel_space_supervise and self.trepa_weight and self.frames % 2:
            raise InputError(f"frames={self.frames}", "TREPA reads pairs of frames", "write an even number")
        if self.resolution < 64 or self.resolution % 64:
            why = "the VAE and the U-Net halve it six times"
            raise InputError(f"resolution={self.resolution}", why, "write a multiple of 64")

    def optimizers(self, nets: Nets) -> dict[str, Optimizer]:
        learning = [p for p in nets["unet"].parameters() if p.requires_grad]
        kind: dict[str, bool] = {self.optimizer: True}
        return {"adamw": torch.optim.AdamW(learning, lr=self.learning_rate, **kind)}  # type: ignore[arg-type]

    def checkpointable(self, nets: Nets) -> list[str]:
        """What upstream recomputes: resnets, attentions, motion modules; blocks of the decoder, SyncNet, TREPA."""
        named: dict[str, Any] = nets
        paths = [f"unet.{path}" for path in named["unet"].recomputable()]
        if self.pixel_space_supervise:
            paths += ["vae.decoder.mid_block", *_items("vae.decoder.up_blocks", named["vae"].decoder.up_blocks)]
        if "syncnet" in named:
            paths += [f"syncnet.{path}" for path in named["syncnet"].recomputable()]
        if "trepa" in named:
            paths += _items("trepa.blocks", named["trepa"].blocks)
        return paths

    def also_checkpointable(self, nets: Nets) -> list[str]:
        """What upstream keeps and could recompute: the U-Net's mid block, LPIPS."""
        named: dict[str, Any] = nets
        paths = [f"unet.mid_block.{path}" for path in ("resnets.0", "attentions.0", "resnets.1")]
        return paths + (_items("lpips.net.slices", named["lpips"].net.slices) if "lpips" in named else [])

    # ---- a step

    def batch(self, shape: Shape) -> dict[str, Tensor]:
        """Made-up clips: pixels (b, f, 3, r, r), masks (b, f, 1, r, r), sound as Whisper and as the SyncNet hear it."""
        dtype, pixels = DTYPES[self.frozen_precision], (shape.items, self.frames, 3, self.resolution, self.resolution)
        made = {name: torch.rand(pixels, dtype=dtype) * 2 - 1 for name in ("gt", "masked", "reference")}
        made["masks"] = torch.ones(shape.items, self.frames, 1, self.resolution, self.resolution, dtype=dtype)
        made["audio"] = torch.randn(shape.items, 80, 3000)
        made["positions"] = torch.randint(0, 1500, (shape.items, self.frames, video.POSITIONS))
        if self.pixel_space_supervise and self.sync_weight:
            made["mel"] = torch.randn(shape.items, 1, 80, video.MEL_COLUMNS, dtype=dtype)
        if self.draws == "sample":
            made |= self._draw(shape.items, made["gt"])
        return made

    def loss(self, nets: Nets, batch: Any) -> Mapping[str, Loss]:
        vae: Any = nets["vae"]
        gt, clips = batch["gt"], batch["gt"].shape[0]
        with torch.no_grad():
            states = hidden_states(nets["whisper"].encoder, batch["audio"])  # type: ignore[arg-type]
            audio = audio_embeddings(states, batch["positions"]).to(gt.dtype)
            del states
        drawn = batch if self.draws == "sample" else self._draw(clips, gt)
        with torch.no_grad():
            clean, masked, reference = (
                _clips(encode_images(vae, batch[name].flatten(0, 1), noise.flatten(0, 1)), clips)
                for name, noise in zip(("gt", "masked", "reference"), drawn["posterior"].unbind(1), strict=True)
            )
            masks = F.interpolate(batch["masks"].flatten(0, 1), size=clean.shape[-2:])
            noise, timesteps = drawn["noise"], drawn["timesteps"]
            scheduler = ddim()
            noisy = scheduler.add_noise(clean, noise, timesteps)
            seen = torch.cat([noisy, _clips(masks, clips), masked, reference], dim=1)
        with self.autocast(gt.device):
            predicted = self.predict(nets, seen, timesteps, audio)
        losses = {}
        if self.recon_weight:
            losses["recon"] = F.mse_loss(predicted.float(), noise.float()) * self.recon_weight
        if self.pixel_space_supervise:
            latents = one_step(scheduler, noisy, predicted, timesteps).to(gt.dtype)
            made = decode_latents(vae, latents.transpose(1, 2).flatten(0, 1))
            losses |= self._pixel_losses(nets, made, gt, batch.get("mel"))
        return {name: Loss(value * clips, clips) for name, value in losses.items()}

    def predict(self, nets: Nets, seen: Tensor, timesteps: Tensor, audio: Tensor) -> Tensor:
        """The noise in latents (b, 13, f, h, w), at these timesteps (b,), for this sound (b, f, 50, 384)."""
        if self.precision == "fp32":
            seen, audio = seen.float(), audio.float()
        noise: Tensor = nets["unet"](seen, timesteps, audio)
        return noise

    def _pixel_losses(self, nets: Nets, made: Tensor, gt: Tensor, mel: Tensor | None) -> dict[str, Tensor]:
        """Of decoded frames (b·f, 3, r, r) against the true ones (b, f, 3, r, r)."""
        clips, half = gt.shape[0], self.resolution // 2
        losses = {}
        if "syncnet" in nets:
            mouths = made.unflatten(0, (clips, -1)).flatten(1, 2)[:, :, half:]
            if mouths.shape[-2:] != self.sync_size:
                mouths = F.interpolate(mouths, size=self.sync_size, mode="bilinear")
            losses["sync"] = sync_loss(*nets["syncnet"](mouths, mel)) * self.sync_weight
        if "lpips" in nets:
            true = gt.flatten(0, 1)[:, :, half:].float()
            losses["lpips"] = nets["lpips"](made[:, :, half:].float(), true).mean() * self.perceptual_weight
        if "trepa" in nets:
            net: Any = nets["trepa"]
            losses["trepa"] = trepa_loss(net, made.unflatten(0, (clips, -1)), gt) * self.trepa_weight
        return losses

    def units(self, batch: Any) -> Mapping[str, int]:
        weights = {"recon": self.recon_weight}
        if self.pixel_space_supervise:
            weights |= {"sync": self.sync_weight, "lpips": self.perceptual_weight, "trepa": self.trepa_weight}
        return {name: int(batch["gt"].shape[0]) for name, weight in weights.items() if weight}

    def _draw(self, clips: int, like: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Noise (b, 4, f, h, w), its timesteps (b,), and what draws the latents (b, 3, f, 4, h, w)."""
        side = self.resolution // 8
        kind: dict[str, Any] = {"device": like.device, "dtype": like.dtype, "generator": generator}
        shared = torch.randn(clips, 4, 1, side, side, **kind).expand(-1, -1, self.frames, -1, -1)
        noise = shared
        if self.mixed_noise:
            noise = (torch.randn(clips, 4, self.frames, side, side, **kind) + shared) * 0.5**0.5
        return {
            "noise": noise,
            "timesteps": torch.randint(0, 1000, (clips,), device=like.device, generator=generator),
            "posterior": torch.randn(clips, 3, self.frames, 4, side, side, **kind),
        }

    def validation_on_host(self) -> Sequence[str]:
        return ("positions", "cepstra", *(("faces", "audio") if self.validation_keeps == "host" else ()))

    def validation_batch(self, shape: Shape) -> dict[str, Tensor]:
        """Made-up faces (v, 3, r, r) as bytes, and their sound as Whisper and as the evaluator hear it."""
        count, home = self.validation_frames, "cpu" if self.validation_keeps == "host" else None
        pixels = (count, 3, self.resolution, self.resolution)
        return {
            "faces": torch.randint(0, 256, pixels, dtype=torch.uint8, device=home),
            "audio": torch.randn(-(-count // 750), 80, 3000, device=home),
            "positions": torch.randint(0, 1500, (count, video.POSITIONS), device="cpu"),
            "cepstra": torch.randn(count, 1, 13, 20, device="cpu"),
        }

    def validate(self, nets: Nets, batch: Any) -> Mapping[str, Tensor]:
        """Upstream's inference on a whole video, then how well lips and sound agree in it."""
        return judge(self, nets, lip_sync(self, nets, batch), batch["cepstra"])

    def dataset(self) -> Sequence[video.TalkingClip]:
        return video.talking_clips(self.clips, self.frames, self.resolution)

    def collate(self, samples: Sequence[video.TalkingClip]) -> dict[str, Tensor]:
        dtype = DTYPES[self.frozen_precision]
        mask = torch.from_numpy(video.mouth_mask(self.resolution))
        gt = video.stacked(clip.frames for clip in samples) / 127.5 - 1
        batch = {
            "gt": gt.to(dtype),
            "masked": (gt * mask).to(dtype),
            "reference": (video.stacked(clip.reference for clip in samples) / 127.5 - 1).to(dtype),
            "masks": mask.expand(len(samples), self.frames, -1, -1, -1).to(dtype).contiguous(),
            "audio": video.stacked(video.whisper_mel(clip.wave) for clip in samples),
            "positions": video.stacked(video.whisper_positions(clip.start, self.frames) for clip in samples),
        }
        if self.pixel_space_supervise and self.sync_weight:
            batch["mel"] = video.stacked(video.sync_mel(clip.wave, clip.start) for clip in samples).to(dtype)
        if self.draws == "sample":
            own = [self._draw(1, batch["gt"], torch.Generator().manual_seed(clip.id)) for clip in samples]
            batch |= {name: torch.cat([sample[name] for sample in own]) for name in own[0]}
        return batch


class LatentSyncStage1At512(LatentSyncStage1):
    """Stage 1 at 512 px."""

    resolution: int = 512


class LatentSyncStage2(LatentSyncStage1):
    """Stage 2 at 256 px: motion modules and attentions learn, judged in pixels too."""

    motion: Motion = "all"
    trained: Literal["all", "motion+attentions", "motion+attn2"] = "motion+attentions"
    pixel_space_supervise: bool = True
    sync_weight: float = 0.05
    perceptual_weight: float = 0.1
    trepa_weight: float = 10.0


class LatentSyncStage2At512(LatentSyncStage2):
    """Stage 2 at 512 px."""

    resolution: int = 512


class LatentSyncStage2Efficient(LatentSyncStage2):
    """Stage 2 for smaller cards: motion modules in the decoder alone, cross-attentions learn, no TREPA."""

    motion: Motion = "decoder"
    trained: Literal["all", "motion+attentions", "motion+attn2"] = "motion+attn2"
    trepa_weight: float = 0.0


def _choose_trained(unet: nn.Module, trained: str) -> None:
    if trained == "all":
        return
    wanted = ("motion_modules.", "attentions.") if trained == "motion+attentions" else ("motion_modules.", "attn2.")
    for name, parameter in unet.named_parameters():
        parameter.requires_grad = any(part in name for part in wanted)


def _clips(frames: Tensor, clips: int) -> Tensor:
    """(b·f, c, h, w) to (b, c, f, h, w)."""
    return frames.unflatten(0, (clips, -1)).transpose(1, 2)


def _items(path: str, modules: Any) -> list[str]:
    return [f"{path}.{index}" for index in range(len(modules))]
