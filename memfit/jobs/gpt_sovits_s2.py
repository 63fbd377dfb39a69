"""GPT-SoVITS, second stage of v1, v2, v2Pro and v2ProPlus: a VITS generator against a discriminator.

A window has two turns. The discriminator's makes the waveform and judges it cut off from the generator; the generator's
judges the same waveform again. Upstream's per-epoch decay of the learning rate (0.999875) is not applied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW, Optimizer

from memfit.errors import InputError
from memfit.job import Job, Loss, Nets, Precision, Shape, Turn
from memfit.jobs.data.mel import compress, make_filters, spectrogram
from memfit.jobs.data.sovits_clips import FRAMES_PER_SECOND, HOP, SovitsClip, sovits_clips
from memfit.jobs.nets.hifigan import Judgement, WaveformDiscriminator
from memfit.jobs.nets.sovits import PERIODS, WIDTHS, Made, Sovits, Widths, crop
from memfit.jobs.upstream import GPT_SOVITS_S2, Upstream

Batch = dict[str, Tensor]


class S2(Job):
    """The second stage. A unit is a clip; the KL term counts frames."""

    precision: Precision = "fp16"
    wrapper: Literal["none", "ddp", "ddp_find_unused"] = "ddp_find_unused"
    zero_grad: Literal["after_step", "after_forward"] = "after_forward"
    version: Literal["v1", "v2", "v2pro", "v2proplus"] = "v2"
    clip_seconds: float = 10.0
    """Length of a made-up clip, and the longest of the data set (upstream: 0.64 to 38)."""
    phonemes_per_second: float = 9.0
    """Of a made-up clip."""
    segment_frames: int = 32
    """Frames of each clip that become a waveform: 20480 samples."""
    learning_rate: float = 1e-4
    text_rate: float = 0.4
    """Learning rate of the text modules, times ``learning_rate``."""
    mel_weight: float = 45.0
    kl_weight: float = 1.0
    clips: int = 64
    """Clips of synthesized speech in the data set."""

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "clip_seconds": (0.5, 3600),
        "phonemes_per_second": (2, 100),
        **dict.fromkeys(("learning_rate", "text_rate", "mel_weight", "kl_weight"), (0, math.inf)),
        **dict.fromkeys(("segment_frames", "clips"), (1, math.inf)),
    }
    smaller_settings: ClassVar[Mapping[str, str]] = {
        "clip_seconds": "shorter clips",
        "segment_frames": "shorter judged segments",
    }
    upstream: ClassVar[Upstream] = GPT_SOVITS_S2

    def widths(self) -> Widths:
        """The sizes of the generator."""
        return WIDTHS[self.version]

    def nets(self) -> Nets:
        if (frames := int(FRAMES_PER_SECOND * self.clip_seconds)) < self.segment_frames:
            why = f"a clip of {frames} frames holds no segment of {self.segment_frames}"
            write = f"write clip_seconds={math.ceil(self.segment_frames / FRAMES_PER_SECOND)}, or fewer segment_frames"
            raise InputError(f"clip_seconds={self.clip_seconds}", why, write)
        make_filters()
        return {"generator": Sovits(self.widths()), "discriminator": WaveformDiscriminator(PERIODS[self.version])}

    def checkpointable(self, nets: Nets) -> list[str]:
        net: Any = nets["generator"]
        parts = {
            "encoder.speech.layers": net.encoder.speech.layers,
            "encoder.text.layers": net.encoder.text.layers,
            "encoder.joint.layers": net.encoder.joint.layers,
            "flow": net.flow,
            "generator.resblocks": net.generator.resblocks,
        }
        return [f"generator.{path}.{k}" for path, modules in parts.items() for k in range(len(modules))]

    def optimizers(self, nets: Nets) -> dict[str, Optimizer]:
        net: Any = nets["generator"]
        text = [net.encoder.text_embedding, net.encoder.text, net.encoder.cross]
        slow = [list(module.parameters()) for module in text]
        own = {id(parameter) for parameters in slow for parameter in parameters}
        rest = [parameter for parameter in net.parameters() if id(parameter) not in own]
        groups: list[dict[str, Any]] = [
            {"params": rest},
            *({"params": some, "lr": self.learning_rate * self.text_rate} for some in slow),
        ]
        how: dict[str, Any] = {"lr": self.learning_rate, "betas": (0.8, 0.99), "eps": 1e-9}
        return {
            "discriminator": AdamW(nets["discriminator"].parameters(), **how),
            "generator": AdamW(groups, **how),
        }

    def batch(self, shape: Shape) -> Batch:
        """features (b, 768, t), spectrum (b, 1025, t), wave (b, 1, 640 t), phonemes (b, p), their lengths (b,)."""
        b, w = shape.items, self.widths()
        t, p = int(FRAMES_PER_SECOND * self.clip_seconds) // 2 * 2, round(self.phonemes_per_second * self.clip_seconds)
        batch = {
            "features": torch.randn(b, w.features, t),
            "spectrum": torch.rand(b, w.spectrum, t),
            "lengths": torch.full((b,), t),
            "wave": torch.randn(b, 1, t * HOP),
            "text": torch.randint(0, w.symbols, (b, p)),
            "text_lengths": torch.full((b,), p),
        }
        return batch | ({"speaker": torch.randn(b, w.speaker)} if w.speaker else {})

    def turns(self, optimizers: Sequence[str]) -> list[Turn]:
        return [
            Turn(name="discriminator", loss=self._judge, optimizers=("discriminator",)),
            Turn(name="generator", loss=self._make, optimizers=("generator",)),
        ]

    def _judge(self, nets: Nets, batch: Batch, shared: dict[str, Any]) -> Loss:
        """LSGAN: real segments toward 1, made ones toward 0."""
        self._generate(nets, batch, shared)
        pairs = nets["discriminator"](shared["real"], shared["made"].wave.detach())
        scores = [((1 - real.float()) ** 2).mean() + (made.float() ** 2).mean() for (real, _), (made, _) in pairs]
        return Loss(torch.stack(scores).sum() * len(batch["lengths"]), len(batch["lengths"]))

    def _make(self, nets: Nets, batch: Batch, shared: dict[str, Any]) -> dict[str, Loss]:
        """Mel distance, feature matching and LSGAN, each a mean over a clip; KL, a mean over frames."""
        if not shared:
            self._generate(nets, batch, shared)
        made: Made = shared["made"]
        pairs = nets["discriminator"](shared["real"], made.wave)
        mel = F.l1_loss(shared["mel_real"], shared["mel_made"]) * self.mel_weight
        adversarial = torch.stack([((1 - score.float()) ** 2).mean() for _, (score, _) in pairs]).sum()
        b = len(batch["lengths"])
        return {
            "generator": Loss((adversarial + _feature_distance(pairs) + mel) * b, b),
            "kl": Loss(_kl(made) * self.kl_weight, batch["lengths"].sum()),
        }

    def _generate(self, nets: Nets, batch: Batch, shared: dict[str, Any]) -> None:
        """The forward that both turns share: made and real segments, as waveforms and as mel."""
        segment = self.segment_frames
        inputs = {key: value for key, value in batch.items() if key != "wave"}
        made: Made = nets["generator"](**inputs, segment=segment)
        shared["made"] = made
        shared["mel_real"] = crop(compress(batch["spectrum"]), made.start, segment)
        shared["mel_made"] = compress(spectrogram(made.wave[:, 0].float()))
        shared["real"] = crop(batch["wave"], made.start * HOP, segment * HOP)

    def units(self, batch: Batch) -> dict[str, int]:
        b = len(batch["lengths"])
        return {"discriminator": b, "generator": b, "kl": int(batch["lengths"].sum())}

    def dataset(self) -> Sequence[SovitsClip]:
        return sovits_clips(self.clips, self.clip_seconds)

    def collate(self, samples: Sequence[SovitsClip]) -> Batch:
        return collate(samples, self.widths())


def collate(samples: Sequence[SovitsClip], widths: Widths) -> Batch:
    """Clips padded to the longest, as ``S2.batch`` shapes them."""
    w = widths
    text = [clip.phonemes(w.symbols) for clip in samples]
    batch = {
        "features": _padded([clip.features(w.features).T for clip in samples]).transpose(1, 2),
        "spectrum": _padded([clip.spectrum.T for clip in samples]).transpose(1, 2),
        "lengths": torch.tensor([clip.spectrum.shape[1] for clip in samples]),
        "wave": _padded([clip.wave for clip in samples])[:, None],
        "text": _padded(text),
        "text_lengths": torch.tensor([len(ids) for ids in text]),
    }
    return batch | ({"speaker": torch.stack([clip.speaker(w.speaker) for clip in samples])} if w.speaker else {})


def _padded(tensors: list[Tensor]) -> Tensor:
    return pad_sequence(tensors, batch_first=True)


def _feature_distance(pairs: list[tuple[Judgement, Judgement]]) -> Tensor:
    distances = [
        F.l1_loss(of_made.float(), of_real.float().detach())
        for (_, real), (_, made) in pairs
        for of_real, of_made in zip(real, made, strict=True)
    ]
    return 2 * torch.stack(distances).sum()


def _kl(made: Made) -> Tensor:
    """KL of the posterior's sample from the prior, summed over channels and valid frames."""
    prior = made.prior_deviation.float()
    distance = (made.flowed.float() - made.prior_mean.float()) ** 2
    kl = prior - made.posterior_deviation.float() - 0.5 + 0.5 * distance * torch.exp(-2.0 * prior)
    return (kl * made.mask).sum()


class GptSovitsTiny(S2):
    """The same code, narrow, on short clips of speech made on the spot."""

    precision: Precision = "fp32"
    wrapper: Literal["none", "ddp", "ddp_find_unused"] = "none"
    clip_seconds: float = 1.6
    phonemes_per_second: float = 20.0
    segment_frames: int = 16
    learning_rate: float = 1e-3
    clips: int = 32

    def widths(self) -> Widths:
        return dataclasses.replace(
            WIDTHS["v2"], features=64, codes=64, hidden=48, inner=96, depth=2, dropout=0.0, cross=64, style=64,
            upsample=32, rates=(10, 8, 8),
            kernels=(16, 16, 16), start=0.1, posterior_depth=3, flow_depth=2,
        )  # fmt: skip

    def nets(self) -> Nets:
        make_filters()
        return {"generator": Sovits(self.widths()), "discriminator": WaveformDiscriminator((2, 5), width=2)}
