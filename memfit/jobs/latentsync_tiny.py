"""LatentSync's second stage small enough for a CPU: narrow nets, 64 px, and drawn faces with their own sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from memfit.job import Precision, Shape
from memfit.jobs.data import frames as video
from memfit.jobs.latentsync import LatentSyncStage2


class LatentSyncTiny(LatentSyncStage2):
    """Stage 2's code at 64 px with narrow nets and 8 frames, all of the U-Net learning, on drawn talking faces."""

    frames: int = 8
    resolution: int = 64
    precision: Precision = "fp32"
    frozen_precision: Precision = "fp32"
    wrapper: Literal["none", "ddp"] = "none"
    trained: Literal["all", "motion+attentions", "motion+attn2"] = "all"
    learning_rate: float = 2e-3
    draws: Literal["step", "sample"] = "sample"
    validation_frames: int = 24
    inference_steps: int = 4
    validate_every: int = 10
    clips: int = 16

    sync_size: ClassVar[tuple[int, int]] = (32, 64)
    detector_size: ClassVar[tuple[int, int]] = (64, 64)
    net_shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "unet": {"channels": (32, 32, 64, 64), "layers": 1, "heads": 4, "context_dim": 32, "groups": 8},
        "vae": {"channels": (8, 16, 16, 16), "groups": 8},
        "whisper": {"dim": 32, "heads": 2},
        "detector": {"width": 0.125},
        "evaluator": {"width": 0.125},
        "syncnet": {
            "visual": (8, 16, 32, 32, 32, 64),
            "visual_strides": ((1, 2), *[(2, 2)] * 5),
            "audio": (8, 16, 16, 32, 32, 32, 64),
            "attention": False,
            "groups": 8,
        },
        "lpips": {"width": 0.125},
        "trepa": {"dim": 64, "layers": 2, "heads": 2, "mlp": 128, "size": 56},
    }

    real_validation_batch: ClassVar[bool] = True

    def validation_batch(self, shape: Shape) -> dict[str, Tensor]:
        """A real video: the drawn face that no training clip shows."""
        (clip,) = video.talking_clips(1, self.validation_frames, self.resolution, seed=1)
        count, device = self.validation_frames, torch.get_default_device()
        return {
            "faces": torch.from_numpy(clip.frames).to("cpu" if self.validation_keeps == "host" else device),
            "audio": torch.from_numpy(video.whisper_mel(clip.wave))[None].to(device),
            "positions": torch.from_numpy(video.whisper_positions(clip.start, count)),
            "cepstra": torch.from_numpy(video.cepstra(clip.wave[clip.start * video.RATE // video.FPS :], count)),
        }
