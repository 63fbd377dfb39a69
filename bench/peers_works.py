"""Training steps that estimators of memory are asked about: an encoder, a decoder and a diffusion U-Net."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy, mse_loss

import memfit


class _Work(memfit.Job):
    """AdamW over all parameters, in fp32."""

    items: int = 4
    input_shape: Any = ()
    """A sample's shape, for tools that make the input themselves."""

    def optimizers(self, nets):  # type: ignore[no-untyped-def]
        return {"adamw": torch.optim.AdamW(nets["net"].parameters(), lr=1e-4)}

    def output(self, net, batch):  # type: ignore[no-untyped-def]
        """The loss as a tool without memfit calls it."""
        return self.loss({"net": net}, batch).sum


class Encoder(_Work):
    """BERT, 6 layers, masked language model; 128 tokens a sample."""

    items: int = 8
    input_shape: Any = (128,)

    def nets(self):  # type: ignore[no-untyped-def]
        from transformers import BertConfig, BertForMaskedLM

        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6}
        return {"net": BertForMaskedLM(BertConfig(vocab_size=8192, **sizes))}

    def batch(self, shape):  # type: ignore[no-untyped-def]
        return torch.randint(0, 8192, (shape.items, 128))

    def loss(self, nets, tokens):  # type: ignore[no-untyped-def]
        logits = nets["net"](tokens).logits.flatten(0, 1)
        return memfit.Loss(cross_entropy(logits, tokens.flatten(), reduction="sum"), tokens.numel())


class Decoder(_Work):
    """Llama, 8 layers; 256 tokens a sample."""

    input_shape: Any = (256,)

    def nets(self):  # type: ignore[no-untyped-def]
        from transformers import LlamaForCausalLM

        return {"net": LlamaForCausalLM(self.config())}

    def config(self):  # type: ignore[no-untyped-def]
        """Transformers' configuration of the net."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=8, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip

    def batch(self, shape):  # type: ignore[no-untyped-def]
        return torch.randint(0, 8192, (shape.items, 256))

    def loss(self, nets, tokens):  # type: ignore[no-untyped-def]
        logits = nets["net"](tokens).logits.flatten(0, 1)
        return memfit.Loss(cross_entropy(logits, tokens.flatten(), reduction="sum"), tokens.numel())


class Pictures(_Work):
    """diffusers' U-Net with attention; 3 x 32 x 32 a sample."""

    input_shape: Any = (3, 32, 32)

    def nets(self):  # type: ignore[no-untyped-def]
        from diffusers import UNet2DModel

        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        return {"net": UNet2DModel(sample_size=32, block_out_channels=(64, 128), norm_num_groups=8, **blocks)}

    def batch(self, shape):  # type: ignore[no-untyped-def]
        return torch.rand(shape.items, 3, 32, 32)

    def loss(self, nets, pictures):  # type: ignore[no-untyped-def]
        time = torch.zeros(len(pictures), dtype=torch.long, device=pictures.device)
        made = nets["net"](pictures, time).sample
        return memfit.Loss(mse_loss(made, pictures, reduction="sum"), len(pictures))


WORKS = {"encoder": Encoder, "decoder": Decoder, "U-Net": Pictures}
