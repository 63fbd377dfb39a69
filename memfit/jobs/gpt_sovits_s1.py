"""GPT-SoVITS, first stage: phonemes to semantic tokens. A unit is a clip; the loss counts tokens.

Upstream's loss also counts each padded token as an end token; here padding counts nowhere, so that a window learns the
same however it is split. Upstream's top-3 accuracy, a metric of every step, is computed where upstream computes it: at
the loss, while the whole graph is alive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

import memfit
from memfit.errors import InputError
from memfit.job import Job, Loss, Nets, Precision, Shape
from memfit.jobs.data.sovits_clips import SovitsClip, sovits_clips
from memfit.jobs.nets.accuracy import top_k_accuracy
from memfit.jobs.nets.text2semantic import Text2Semantic
from memfit.jobs.optimizers.scaled_adam import ScaledAdam
from memfit.jobs.upstream import GPT_SOVITS_S1, Upstream

SYMBOLS = {"v1": 512, "v2": 732}
TOKENS_PER_SECOND = 25
TEXT_FEATURES = 1024


class S1(Job):
    """The first stage of v1 and v2: 24 layers of 512."""

    precision: Precision = "fp16"
    wrapper: Literal["none", "ddp", "ddp_find_unused"] = "ddp"
    version: Literal["v1", "v2"] = "v2"
    clip_seconds: float = 10.0
    """Length of a made-up clip, and the longest of the data set; memory grows with its square (upstream: up to 54)."""
    attention: Literal["fused", "unfused"] = "fused"
    """fused, as upstream: the kernel that torch chooses. unfused: every layer keeps its scores, of (b x 16, S, S)."""
    phonemes_per_second: float = 9.0
    """Of a made-up clip."""
    accuracy: Literal["top3", "none"] = "top3"
    """The metric that upstream logs in every step; it is not trained on."""
    learning_rate: float = 0.002
    """Constant: upstream's code overrides the schedule of its configuration."""
    dim: int = 512
    """Width of the transformer."""
    depth: int = 24
    """Layers."""
    dropout: float = 0.1
    """Of the embeddings and in every layer, as upstream."""
    clips: int = 64
    """Clips of synthesized speech in the data set."""

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "clip_seconds": (0.5, 3600),
        "phonemes_per_second": (2, 100),
        "learning_rate": (0, math.inf),
        "dropout": (0, 1),
        **dict.fromkeys(("dim", "depth", "clips"), (1, math.inf)),
    }
    smaller_settings: ClassVar[Mapping[str, str]] = {"clip_seconds": "shorter clips"}
    upstream: ClassVar[Upstream] = GPT_SOVITS_S1

    def nets(self) -> Nets:
        net = Text2Semantic(
            phonemes=SYMBOLS[self.version],
            dim=self.dim,
            depth=self.depth,
            num_heads=max(1, self.dim // 32),
            dropout=self.dropout,
            fused=self.attention == "fused",
        )
        return {"gpt": net}

    def checkpointable(self, nets: Nets) -> list[str]:
        return [f"gpt.layers.{k}" for k in range(self.depth)]

    def parallelize(self, nets: Nets, mesh: DeviceMesh) -> None:
        """Heads and the feed-forward's width are shared out; embeddings, norms and the prediction stay whole."""
        net: Any = nets["gpt"]
        if net.num_heads % mesh.size():
            why = f"{net.num_heads} heads (dim / 32) do not divide by it"
            raise InputError(f"net 'gpt' on tp={mesh.size()}", why, "write another tp")
        net.num_heads //= mesh.size()
        for layer in net.layers:
            layer.num_heads = net.num_heads
            styles = {"qkv": memfit.FusedColwiseParallel(parts=3), "out": RowwiseParallel()}
            parallelize_module(layer, mesh, {**styles, "widen": ColwiseParallel(), "narrow": RowwiseParallel()})

    def optimizers(self, nets: Nets) -> dict[str, Optimizer]:
        parameters = nets["gpt"].parameters()
        return {"scaled_adam": ScaledAdam(parameters, self.learning_rate, (0.9, 0.95), clipping_period=1000)}

    def batch(self, shape: Shape) -> dict[str, Tensor]:
        """phonemes (b, p), tokens (b, t), their lengths (b,), text features (b, 1024, p)."""
        p, t = round(self.phonemes_per_second * self.clip_seconds), round(TOKENS_PER_SECOND * self.clip_seconds)
        return {
            "phonemes": torch.randint(0, SYMBOLS[self.version], (shape.items, p)),
            "phoneme_lengths": torch.full((shape.items,), p),
            "tokens": torch.randint(0, 1024, (shape.items, t)),
            "token_lengths": torch.full((shape.items,), t),
            "text_features": torch.zeros(shape.items, TEXT_FEATURES, p),
        }

    def loss(self, nets: Nets, batch: dict[str, Tensor]) -> Loss:
        """Cross-entropy of each next token, summed."""
        logits, targets = nets["gpt"](**batch)
        total = F.cross_entropy(logits, targets, reduction="sum")
        if self.accuracy == "top3":
            with torch.no_grad():
                end = logits.shape[1] - 1
                top_k_accuracy(logits.detach(), targets.masked_fill(targets < 0, end), 3, ignored=end)
        return Loss(total, (targets >= 0).sum())

    def units(self, batch: dict[str, Tensor]) -> int:
        return int(batch["token_lengths"].sum())

    def dataset(self) -> Sequence[SovitsClip]:
        return sovits_clips(self.clips, self.clip_seconds)

    def collate(self, samples: Sequence[SovitsClip]) -> dict[str, Tensor]:
        """Text features are zeros, as upstream gives them for any language but Chinese."""
        phonemes = [clip.phonemes(SYMBOLS[self.version]) for clip in samples]
        tokens = [clip.tokens(1024) for clip in samples]
        padded = pad_sequence(phonemes, batch_first=True)
        return {
            "phonemes": padded,
            "phoneme_lengths": torch.tensor([len(ids) for ids in phonemes]),
            "tokens": pad_sequence(tokens, batch_first=True),
            "token_lengths": torch.tensor([len(ids) for ids in tokens]),
            "text_features": torch.zeros(len(samples), TEXT_FEATURES, padded.shape[1]),
        }
