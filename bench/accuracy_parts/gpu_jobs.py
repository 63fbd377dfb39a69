"""Nets of diffusers and Transformers as jobs, for bench/measure_gpu.py beside the built-in ones and timm's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from bench.accuracy_parts.timm_job import import_timm
from memfit.job import Job, Loss, Nets, Shape


class _Chosen(Job):
    """AdamW in the implementation that is asked for."""

    implementation: Literal["foreach", "fused", "single"] = "foreach"

    def optimizers(self, nets: Nets) -> dict[str, Any]:
        way = {"foreach": self.implementation == "foreach", "fused": self.implementation == "fused"}
        return {name: torch.optim.AdamW(net.parameters(), lr=1e-4, **way) for name, net in nets.items()}


class UNet(_Chosen):
    """diffusers' conditional U-Net, 16 x 64 x 64 latents."""

    def nets(self) -> Nets:
        from diffusers import UNet2DConditionModel

        widths = (128, 256, 512, 512)
        return {"unet": UNet2DConditionModel(64, 4, 4, block_out_channels=widths, cross_attention_dim=768)}

    def batch(self, shape: Shape) -> tuple[Tensor, ...]:
        return torch.randn(shape.items, 4, 64, 64), torch.zeros(shape.items), torch.randn(shape.items, 77, 768)

    def loss(self, nets: Nets, batch: tuple[Tensor, ...]) -> Loss:
        return Loss(nets["unet"](*batch).sample.float().square().mean((1, 2, 3)).sum(), len(batch[0]))


class Language(_Chosen):
    """Transformers' GPT-2 or a small Llama, 512 tokens."""

    net: Literal["gpt2", "llama"] = "gpt2"

    def nets(self) -> Nets:
        from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

        config = GPT2Config() if self.net == "gpt2" else LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=32_000,
        )  # fmt: skip
        return {"lm": AutoModelForCausalLM.from_config(config)}

    def batch(self, shape: Shape) -> Tensor:
        return torch.randint(0, 30_000, (shape.items, 512))

    def loss(self, nets: Nets, batch: Tensor) -> Loss:
        return Loss(nets["lm"](input_ids=batch, labels=batch).loss * len(batch), len(batch))


class Picture(_Chosen):
    """A net of timm on images of 224 x 224, with or without cudnn.benchmark."""

    model: str = "resnet50"
    benchmark: bool = False

    def nets(self) -> Nets:
        torch.backends.cudnn.benchmark = self.benchmark
        return {"net": import_timm().create_model(self.model).train()}

    def batch(self, shape: Shape) -> tuple[Tensor, Tensor]:
        return torch.randn(shape.items, 3, 224, 224), torch.zeros(shape.items, dtype=torch.int64)

    def loss(self, nets: Nets, batch: tuple[Tensor, Tensor]) -> Loss:
        logits = nets["net"](batch[0])
        return Loss(torch.nn.functional.cross_entropy(logits, batch[1], reduction="sum"), len(logits))
