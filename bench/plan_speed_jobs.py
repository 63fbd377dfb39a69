"""Jobs of about 850 M parameters as a person would write them, for bench.plan_speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memfit import Job, Nets, Shape


class Decoder(Job):
    """A Transformers decoder of 0.85 G parameters, trained on tokens."""

    precision = "bf16"
    tokens: int = 1024

    def nets(self) -> Nets:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=26, num_attention_heads=16,
            num_key_value_heads=16, use_cache=False,
        )  # fmt: skip
        return {"decoder": LlamaForCausalLM(config)}

    def optimizers(self, nets: Nets) -> dict[str, torch.optim.Optimizer]:
        return {"decoder": torch.optim.AdamW(nets["decoder"].parameters(), lr=1e-4)}

    def batch(self, shape: Shape) -> dict[str, Tensor]:
        return {"tokens": torch.randint(32000, (shape.items, self.tokens))}

    def loss(self, nets: Nets, batch: Any) -> tuple[Tensor, int]:
        logits = nets["decoder"](input_ids=batch["tokens"]).logits
        targets = batch["tokens"][:, 1:]
        total = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total / targets.shape[1], len(targets)


class Unet(Job):
    """Stable Diffusion's U-Net of 0.86 G parameters, trained on latents and text states."""

    precision = "fp16"
    side: int = 64

    def nets(self) -> Nets:
        from diffusers import UNet2DConditionModel

        return {"unet": UNet2DConditionModel(sample_size=self.side, cross_attention_dim=768, attention_head_dim=8)}

    def optimizers(self, nets: Nets) -> dict[str, torch.optim.Optimizer]:
        return {"unet": torch.optim.AdamW(nets["unet"].parameters(), lr=1e-5)}

    def batch(self, shape: Shape) -> dict[str, Tensor]:
        latents = torch.randn(shape.items, 4, self.side, self.side)
        return {"latents": latents, "noise": torch.randn_like(latents), "text": torch.randn(shape.items, 77, 768)}

    def loss(self, nets: Nets, batch: Any) -> tuple[Tensor, int]:
        times = torch.randint(1000, (len(batch["latents"]),), device=batch["latents"].device)
        predicted_noise = nets["unet"](batch["latents"] + batch["noise"], times, batch["text"]).sample
        error = (predicted_noise.float() - batch["noise"]) ** 2
        return error.mean((1, 2, 3)).sum(), len(error)
