"""GPT-SoVITS, second stage of v3: a flow-matching DiT gives mel frames; the speech and text encoder stays frozen.

In 30 % of the micro-batches upstream first runs the net twice more, to teach it steps of other lengths (shortcut
models: Frans et al. 2024). Which ones is drawn with the data, so that a step takes no decision on a tensor's value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW, Optimizer

from memfit.job import Job, Loss, Nets, Precision, Shape
from memfit.jobs.data.sovits_clips import FRAMES_PER_SECOND, SovitsClip, sovits_clips
from memfit.jobs.gpt_sovits_s2 import collate
from memfit.jobs.nets.lora import adapt
from memfit.jobs.nets.sovits import WIDTHS, SovitsV3
from memfit.jobs.upstream import GPT_SOVITS_S2_V3, Upstream

MEL, MEL_PER_FRAME = 100, 1.875
Batch = dict[str, Tensor]


class S2V3(Job):
    """The second stage of v3, whole or with adapters on the DiT's attention. A unit is a clip."""

    precision: Precision = "fp16"
    wrapper: Literal["none", "ddp", "ddp_find_unused"] = "ddp_find_unused"
    """Upstream wraps the whole net on one card too, and leaves it bare with adapters."""
    zero_grad: Literal["after_step", "after_forward"] = "after_forward"
    lora: Literal[0, 16, 32, 64, 128] = 0
    """Rank of the adapters; 0: the whole DiT is trained."""
    clip_seconds: float = 10.0
    """Length of a made-up clip, and the longest of the data set (upstream: 0.64 to 38)."""
    shortcut: float = 0.3
    """Chance of the two extra forwards in a micro-batch of the data set; a made-up micro-batch always has them."""
    phonemes_per_second: float = 9.0
    """Of a made-up clip."""
    learning_rate: float = 1e-4
    dim: int = 1024
    """Width of the DiT."""
    depth: int = 22
    """Blocks of the DiT."""
    clips: int = 64
    """Clips of synthesized speech in the data set."""

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "clip_seconds": (0.5, 3600),
        "phonemes_per_second": (2, 100),
        "shortcut": (0, 1),
        "learning_rate": (0, math.inf),
        **dict.fromkeys(("dim", "depth", "clips"), (1, math.inf)),
    }
    upstream: ClassVar[Upstream] = GPT_SOVITS_S2_V3

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.lora and "wrapper" not in values:
            self.wrapper = "none"

    def nets(self) -> Nets:
        net = SovitsV3(WIDTHS["v2"], dim=self.dim, depth=self.depth, num_heads=max(1, self.dim // 64))
        if self.lora:
            adapt(net.dit, ("to_q", "to_k", "to_v", "to_out"), self.lora)
        return {"sovits": net}

    def checkpointable(self, nets: Nets) -> list[str]:
        return [f"sovits.dit.transformer_blocks.{k}" for k in range(self.depth)]

    def optimizers(self, nets: Nets) -> dict[str, Optimizer]:
        trained = [parameter for parameter in nets["sovits"].parameters() if parameter.requires_grad]
        return {"adamw": AdamW(trained, lr=self.learning_rate, betas=(0.8, 0.99), eps=1e-9)}

    def batch(self, shape: Shape) -> Batch:
        """features (b, 768, t), spectrum (b, 1025, t), mel (b, 1.875 t, 100), phonemes (b, p), their lengths (b,).

        ``halvings`` (b,): the step of the extra forwards is 2^-halvings; (0,): there are none.
        """
        b, w = shape.items, WIDTHS["v2"]
        t, p = int(FRAMES_PER_SECOND * self.clip_seconds) // 2 * 2, round(self.phonemes_per_second * self.clip_seconds)
        n = int(MEL_PER_FRAME * t)
        return {
            "features": torch.randn(b, w.features, t),
            "spectrum": torch.rand(b, w.spectrum, t),
            "lengths": torch.full((b,), t),
            "text": torch.randint(0, w.symbols, (b, p)),
            "text_lengths": torch.full((b,), p),
            "mel": torch.randn(b, n, MEL),
            "mel_lengths": torch.full((b,), n),
            "halvings": torch.randint(2, 8, (b if self.shortcut else 0,)),
        }

    def loss(self, nets: Nets, batch: Batch) -> Loss:
        """Squared error of the flow after the prompt: the mean over a clip's frames and bands, summed over clips."""
        net: Any = nets["sovits"]
        mel, mel_lengths = batch["mel"], batch["mel_lengths"]
        b, n = mel.shape[:2]
        names = ("features", "spectrum", "lengths", "text", "text_lengths", "mel_lengths")
        condition = net.condition(*(batch[name] for name in names), n)
        at = torch.arange(n, device=mel.device)[None]
        prompt_lengths = (torch.rand(b, device=mel.device) * mel_lengths * 2 / 3).floor()
        in_prompt = (at < prompt_lengths[:, None])[..., None]
        valid = at < mel_lengths[:, None]

        noise, time = torch.randn_like(mel), torch.rand(b, device=mel.device)
        flow, step = mel - noise, torch.zeros_like(time)
        noised = (noise + time[:, None, None] * flow).masked_fill(in_prompt, 0.0)
        prompt = mel.masked_fill(~in_prompt, 0.0)

        def estimate(x: Tensor, at_time: Tensor, of_step: Tensor) -> Tensor:
            return net.dit(x, prompt, condition, at_time, mask=valid, step=of_step)

        if len(batch["halvings"]):
            half = 0.5 ** batch["halvings"].to(mel.dtype)
            asked = half.masked_fill(half < 1e-2, 0.0)
            first = estimate(noised, time, asked).detach()
            second = estimate(noised + half[:, None, None] * first, time + half, asked).detach()
            flow, step = (first + second) / 2, 2 * half
        error = (estimate(noised, time, step) - flow) ** 2
        counted = valid[..., None] & ~in_prompt
        means = (error * counted).sum(dim=(1, 2)) / (counted.sum(dim=(1, 2)) * MEL)
        return Loss(means.sum(), b)

    def units(self, batch: Batch) -> int:
        return len(batch["mel"])

    def dataset(self) -> Sequence[SovitsClip]:
        return sovits_clips(self.clips, self.clip_seconds)

    def collate(self, samples: Sequence[SovitsClip]) -> Batch:
        batch = collate(samples, WIDTHS["v2"])
        del batch["wave"]
        drawn = len(samples) if random.random() < self.shortcut else 0
        return batch | {
            "mel": pad_sequence([clip.mel for clip in samples], batch_first=True),
            "mel_lengths": torch.tensor([len(clip.mel) for clip in samples]),
            "halvings": torch.randint(2, 8, (drawn,)),
        }
