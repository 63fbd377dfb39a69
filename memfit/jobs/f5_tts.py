"""F5-TTS and E2 TTS: a flow from noise to mel frames, given text and the rest of the clip.

The loss is conditional flow matching (Lipman et al. 2023), as a mean squared error inside a masked span of frames.
Whatever is random is a tensor, and spans are masks by comparison, so that a step takes no decision on a tensor's value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from memfit.job import Job, Loss, Nets, Shape
from memfit.jobs.data.speech import Utterance, frame_counts, synthesize
from memfit.jobs.nets.dit import DiT, UNetT
from memfit.jobs.upstream import Upstream, f5_tts

FRAMES_PER_SECOND = 24000 / 256
MEL = 100


class F5TTS(Job, ABC):
    """What F5-TTS and E2 TTS share. A unit is a padded mel frame: 24 kHz, hop 256, 93.75 frames a second."""

    unit: ClassVar[str] = "frames"
    longest: int | None = 2812
    """30 s."""
    checkpoint: str = "none"
    clip: float | None = 1.0
    ema: float | None = 0.9999
    vocabulary: int = 2545
    """Characters; one more embedding is for padding."""
    dropout: float = 0.1
    optimizer: Literal["fused", "foreach", "8bit"] = "fused"
    wrapper: Literal["none", "ddp_find_unused"] = "none"
    learning_rate: float = 7.5e-5
    warmup_windows: int = 20000
    cond_drop: float = 0.2
    """Chance that a micro-batch loses its conditioning mel and its text."""
    mel_drop: float = 0.3
    """Chance that a micro-batch loses its conditioning mel alone."""
    ignore_padding: bool = False
    """True: a clip's loss does not depend on the clips beside it. False, as upstream: attention and response norms see
    padding. True costs memory that grows with the square of the length."""
    draws: Literal["step", "sample"] = "step"
    """Where noise, flow time, span and drops come from: the step (upstream), or each sample's own seed, so that a
    window learns the same however it is split."""
    clips: int = 64
    """Clips of synthesized speech in the data set."""

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(("vocabulary", "clips"), (1, math.inf)),
        **dict.fromkeys(("learning_rate", "warmup_windows"), (0, math.inf)),
        **dict.fromkeys(("dropout", "cond_drop", "mel_drop"), (0, 1)),
    }
    upstream: ClassVar[Upstream] = f5_tts("F5TTS_Base")

    @abstractmethod
    def _net(self) -> nn.Module:
        """The transformer of this model."""

    net_name: ClassVar[str] = "dit"

    def nets(self) -> Nets:
        return {self.net_name: self._net()}

    def checkpointable(self, nets: Nets) -> list[str]:
        blocks: Any = nets[self.net_name].transformer_blocks
        return [f"{self.net_name}.transformer_blocks.{k}" for k in range(len(blocks))]

    def optimizers(self, nets: Nets) -> dict[str, Optimizer]:
        parameters = list(nets[self.net_name].parameters())
        if self.optimizer == "8bit":
            from memfit.jobs.optimizers.adam8bit import AdamW8bit

            return {"adamw": AdamW8bit(parameters, lr=self.learning_rate)}
        kind: dict[str, bool] = {self.optimizer: True}
        return {"adamw": torch.optim.AdamW(parameters, lr=self.learning_rate, **kind)}  # type: ignore[arg-type]

    def schedules(self, optimizers: Mapping[str, Optimizer], windows: int) -> dict[str, LRScheduler]:
        """Learning-rate schedules, stepped once a window: linear up over the warm-up, then linear down to the end."""
        warmup = max(1, min(self.warmup_windows, windows))
        return {
            name: SequentialLR(
                optimizer,
                [
                    LinearLR(optimizer, start_factor=1e-8, end_factor=1.0, total_iters=warmup),
                    LinearLR(optimizer, start_factor=1.0, end_factor=1e-8, total_iters=max(1, windows - warmup)),
                ],
                milestones=[warmup],
            )
            for name, optimizer in optimizers.items()
        }

    def batch(self, shape: Shape) -> dict[str, Tensor]:
        """mel (b, n, 100), lengths (b,), text ids (b, t): about 15 characters a second."""
        n = shape.length or 1
        batch = {
            "mel": torch.randn(shape.items, n, MEL),
            "lengths": torch.full((shape.items,), n),
            "text": torch.randint(0, self.vocabulary, (shape.items, max(1, n * 5 // 32))),
        }
        return batch | (_draws(batch["mel"], batch["lengths"], self) if self.draws == "sample" else {})

    def loss(self, nets: Nets, batch: dict[str, Tensor]) -> Loss:
        """Squared error of the flow, summed over the masked frames (mean over the mel bands of each)."""
        net, mel, lengths = nets[self.net_name], batch["mel"], batch["lengths"]
        drawn = batch if self.draws == "sample" else _draws(mel, lengths, self)
        at = torch.arange(mel.shape[1], device=mel.device)[None, :]
        valid = at < lengths[:, None]
        span = (at >= drawn["span_start"][:, None]) & (at < drawn["span_end"][:, None])
        time = drawn["time"][:, None, None]
        noised = (1 - time) * drawn["noise"] + time * mel
        flow = mel - drawn["noise"]
        condition = mel.masked_fill(span[..., None], 0.0) * drawn["keep_mel"][:, None, None]
        predicted = net(noised, condition, batch["text"], drawn["time"], mask=valid, keep_text=drawn["keep_text"])
        error = F.mse_loss(predicted, flow, reduction="none")
        return Loss((error * span[..., None]).sum() / MEL, span.sum())

    def dataset(self) -> Sequence[Utterance]:
        return synthesize(self.clips, seconds=self._seconds())

    def lengths(self) -> Sequence[int]:
        if type(self).dataset is not F5TTS.dataset:  # a job of the person's own, with clips of its own
            return [len(utterance.mel) for utterance in self.dataset()]
        return frame_counts(self.clips, seconds=self._seconds())

    def _seconds(self) -> float:
        return (self.longest or 2812) / FRAMES_PER_SECOND

    def collate(self, samples: Sequence[Utterance]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(s.mel) for s in samples])
        mel = nn.utils.rnn.pad_sequence([s.mel for s in samples], batch_first=True)
        ids = [torch.tensor(s.characters(self.vocabulary)) for s in samples]
        batch = {"mel": mel, "lengths": lengths, "text": nn.utils.rnn.pad_sequence(ids, True, -1)}
        if self.draws == "step":
            return batch
        own = [_draws(s.mel[None], lengths[k : k + 1], self, seed=s.id) for k, s in enumerate(samples)]
        padded = {"noise": nn.utils.rnn.pad_sequence([draw.pop("noise")[0] for draw in own], batch_first=True)}
        return batch | padded | {key: torch.cat([draw[key] for draw in own]) for key in own[0]}


def _draws(mel: Tensor, lengths: Tensor, job: F5TTS, seed: int | None = None) -> dict[str, Tensor]:
    """Noise (b, n, mel); flow time, span bounds and keeps (b,). A span is 70 to 100 % of its clip.

    The two drops are one draw for the whole micro-batch, applied as a factor of 0 or 1: the same bytes as upstream's
    zeros in a micro-batch that is dropped.
    """
    b, device = len(mel), mel.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    kept = torch.rand(2, device=device, generator=generator)
    time, fraction, place = torch.rand(3, b, device=device, generator=generator)
    span = ((0.7 + 0.3 * fraction) * lengths).long()
    start = ((lengths - span) * place).long()
    keep_text = (kept[0] >= job.cond_drop).to(mel.dtype).expand(b)
    return {
        "noise": torch.randn(mel.shape, device=device, dtype=mel.dtype, generator=generator),
        "time": time,
        "span_start": start,
        "span_end": start + span,
        "keep_text": keep_text,
        "keep_mel": keep_text * (kept[1] >= job.mel_drop),
    }


class F5Base(F5TTS):
    """F5-TTS Base (v1 too): 22 blocks of 1024."""

    def _net(self) -> nn.Module:
        return DiT(dim=1024, depth=22, num_heads=16, **_common(self))


class F5Small(F5TTS):
    """F5-TTS Small: 18 blocks of 768."""

    upstream: ClassVar[Upstream] = f5_tts("F5TTS_Small")

    def _net(self) -> nn.Module:
        return DiT(dim=768, depth=18, num_heads=12, **_common(self))


class F5Tiny(F5TTS):
    """The same code, narrow, on short clips of speech made on the spot; every split of a window learns the same."""

    longest: int | None = 282
    vocabulary: int = 256
    dropout: float = 0.0
    learning_rate: float = 2e-3
    warmup_windows: int = 4
    ema: float | None = 0.99
    ignore_padding: bool = True
    draws: Literal["step", "sample"] = "sample"
    dim: int = 128
    """Width of the transformer."""
    depth: int = 4
    """Transformer blocks."""

    def _net(self) -> nn.Module:
        common = _common(self) | {"text_dim": 64, "text_layers": 2}
        return DiT(dim=self.dim, depth=self.depth, num_heads=max(1, self.dim // 32), head_dim=32, **common)


class E2Base(F5TTS):
    """E2 TTS Base: a flat U-Net transformer, 24 blocks of 1024."""

    upstream: ClassVar[Upstream] = f5_tts("E2TTS_Base")
    net_name: ClassVar[str] = "unett"

    def _net(self) -> nn.Module:
        return UNetT(dim=1024, depth=24, num_heads=16, **_common(self))


class E2Small(F5TTS):
    """E2 TTS Small: 20 blocks of 768."""

    upstream: ClassVar[Upstream] = f5_tts("E2TTS_Small")
    net_name: ClassVar[str] = "unett"

    def _net(self) -> nn.Module:
        return UNetT(dim=768, depth=20, num_heads=12, **_common(self))


def _common(job: F5TTS) -> dict[str, Any]:
    return {"vocabulary": job.vocabulary, "dropout": job.dropout, "ignore_padding": job.ignore_padding}
