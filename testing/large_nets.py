"""The nets that the planner's benchmark trains: a DiT, a U-Net and a Transformers decoder, with plain SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.job import Job, Loss, Nets, Shape


class Attention(nn.Module):
    """Self-attention over frames (b, n, d)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A DiT block (Peebles and Xie, 2023): adaptive layer norms around attention and a feed-forward."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation, self.attention = nn.Linear(dim, 6 * dim), Attention(dim, heads)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Dropout(dropout), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(F.silu(t))[:, None].chunk(6, -1)
        x = x + c * self.attention(self.norm_1(x) * (1 + a) + b)
        out: Tensor = x + f * self.feed_forward(self.norm_2(x) * (1 + d) + e)
        return out


class DiT(nn.Module):
    """Frames (b, n, 100) at times (b,) to frames."""

    def __init__(self, dim: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.into, self.out, self.time = nn.Linear(100, dim), nn.Linear(dim, 100), nn.Linear(1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden, t = self.into(x), self.time(t[:, None])
        for block in self.blocks:
            hidden = block(hidden, t)
        out: Tensor = self.out(hidden)
        return out


class Plain(Job):
    """Settings and optimizer that the three have in common."""

    def optimizers(self, nets: Nets) -> dict[str, Any]:
        return {
            name: torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-3, foreach=False)
            for name, net in nets.items()
        }


class Dit(Plain):
    """768 x 18 x 12, as F5-TTS Small; a sample is a clip of ``frames``."""

    dim: int = 768
    depth: int = 18
    heads: int = 12
    frames: int = 300
    dropout: float = 0.1

    def nets(self) -> Nets:
        return {"dit": DiT(self.dim, self.depth, self.heads, self.dropout)}

    def batch(self, shape: Shape) -> Any:
        return torch.randn(shape.items, self.frames, 100), torch.rand(shape.items)

    def loss(self, nets: Nets, batch: Any) -> Loss:
        x, t = batch
        return Loss((nets["dit"](x, t) - x).square().mean((1, 2)).sum(), len(x))


class UNet(Plain):
    """diffusers' U-Net, two resnets a stage, attention in three of four."""

    widths: str = "128,256,512,512"
    side: int = 32

    def nets(self) -> Nets:
        from diffusers import UNet2DConditionModel

        widths = tuple(int(width) for width in self.widths.split(","))
        net: Any = UNet2DConditionModel(
            sample_size=self.side, in_channels=4, out_channels=4, block_out_channels=widths, cross_attention_dim=256,
            attention_head_dim=8,
        )  # fmt: skip
        return {"unet": net}

    def batch(self, shape: Shape) -> Any:
        return torch.randn(shape.items, 4, self.side, self.side), torch.randn(shape.items, 16, 256)

    def loss(self, nets: Nets, batch: Any) -> Loss:
        x, context = batch
        seen = nets["unet"](x, torch.zeros(1, dtype=torch.long, device=x.device), context).sample
        return Loss((seen - x).square().mean((1, 2, 3)).sum(), len(x))


class Decoder(Plain):
    """A Llama of Transformers; a sample is a text of ``length`` tokens."""

    dim: int = 512
    depth: int = 12
    heads: int = 8
    length: int = 256
    vocabulary: int = 4096

    def nets(self) -> Nets:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.dim, intermediate_size=4 * self.dim,
            num_hidden_layers=self.depth, num_attention_heads=self.heads, num_key_value_heads=self.heads,
            use_cache=False,
        )  # fmt: skip
        net: Any = LlamaForCausalLM(config)
        return {"lm": net}

    def batch(self, shape: Shape) -> Any:
        return torch.randint(0, self.vocabulary, (shape.items, self.length))

    def loss(self, nets: Nets, batch: Any) -> Loss:
        logits = nets["lm"](input_ids=batch).logits[:, :-1].flatten(0, 1)
        target = batch[:, 1:].flatten()
        return Loss(F.cross_entropy(logits, target, reduction="sum"), target.numel())
