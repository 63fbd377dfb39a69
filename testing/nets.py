"""Six small jobs of different kinds, for tests that run them really."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from memfit.job import Job, Loss, Turn


class Small(Job):
    """Settings that the six have in common."""

    optimizer: str = "adamw"
    foreach: bool = False
    real_validation_batch = True

    def optimizers(self, nets):
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[self.optimizer]
        return {name: kind(net.parameters(), lr=1e-3, foreach=self.foreach) for name, net in nets.items()}

    def validate(self, nets, batch):
        with self.autocast("cpu"):
            return {name: pair[0].detach() for name, pair in self.named(self.loss(nets, batch)).items()}

    @staticmethod
    def named(loss: Any) -> dict:
        return loss if isinstance(loss, dict) else {"loss": loss}


class Convolution(Small):
    def nets(self):
        layers = [
            nn.Conv2d(3, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1, stride=2),
            nn.BatchNorm2d(48),
            nn.SiLU(),
            nn.Conv2d(48, 48, 3, padding=1, groups=48),
            nn.Conv2d(48, 32, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(32, 10),
        ]
        return {"net": nn.Sequential(*layers)}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 3, 48, 48), "y": torch.randint(0, 10, (shape.items,))}

    def loss(self, nets, batch):
        return Loss(F.cross_entropy(nets["net"](batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


class UNet(Small):
    def nets(self):
        from diffusers import UNet2DConditionModel

        return {
            "unet": UNet2DConditionModel(
                sample_size=16,
                in_channels=4,
                out_channels=4,
                layers_per_block=1,
                block_out_channels=(32, 64),
                cross_attention_dim=24,
                attention_head_dim=4,
                norm_num_groups=8,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            )
        }

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 4, 16, 16), "c": torch.randn(shape.items, 6, 24)}

    def loss(self, nets, batch):
        noise = torch.randn_like(batch["x"])
        steps = torch.zeros(len(noise), dtype=torch.long, device=noise.device)
        out = nets["unet"](batch["x"] + noise, steps, batch["c"]).sample
        return Loss(F.mse_loss(out.float(), noise, reduction="none").mean((1, 2, 3)).sum(), len(noise))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(dim, elementwise_affine=False), nn.Linear(dim, 6 * dim)
        self.attention = Attention(dim, heads)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Dropout(0.1), nn.Linear(4 * dim, dim)
        )

    def forward(self, x, t):
        a, b, c, d, e, f = self.modulation(F.silu(t))[:, None].chunk(6, -1)
        x = x + c * self.attention(self.norm(x) * (1 + a) + b)
        return x + f * self.feed_forward(self.norm(x) * (1 + d) + e)


class DiT(nn.Module):
    def __init__(self, dim, depth, heads):
        super().__init__()
        self.into, self.out, self.time = nn.Linear(16, dim), nn.Linear(dim, 16), nn.Linear(1, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))

    def forward(self, x, t):
        x, t = self.into(x), self.time(t[:, None])
        for block in self.blocks:
            x = block(x, t)
        return self.out(x)


class Transformer(Small):
    """A DiT on frames of varied length; dropout inside."""

    unit: ClassVar[str] = "frames"
    longest: int | None = 64
    dim: int = 64
    depth: int = 3

    def nets(self):
        return {"dit": DiT(self.dim, self.depth, 4)}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, shape.length or 1, 16), "t": torch.rand(shape.items)}

    def loss(self, nets, batch):
        error = nets["dit"](batch["x"], batch["t"]).float() - batch["x"]
        return Loss(error.square().mean(-1).sum(), error.shape[0] * error.shape[1])


class Decoder(Small):
    layers: int = 2

    def nets(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=211,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        return {"lm": LlamaForCausalLM(config)}

    def batch(self, shape):
        return {"ids": torch.randint(0, 211, (shape.items, 33))}

    def loss(self, nets, batch):
        logits = nets["lm"](input_ids=batch["ids"]).logits[:, :-1].flatten(0, 1)
        target = batch["ids"][:, 1:].flatten()
        return Loss(F.cross_entropy(logits.float(), target, reduction="sum"), target.numel())


class Recurrent(Small):
    """Layers both ways over padded sequences, with dropout between them."""

    def nets(self):
        return {
            "in": nn.Embedding(97, 24),
            "rnn": nn.LSTM(24, 40, 2, batch_first=True, bidirectional=True, dropout=0.1),
            "gru": nn.GRU(80, 32, batch_first=True),
            "out": nn.Linear(32, 7),
        }

    def batch(self, shape):
        return torch.randint(0, 97, (shape.items, 21))

    def loss(self, nets, batch):
        hidden, _ = nets["rnn"](nets["in"](batch))
        out = nets["out"](nets["gru"](hidden)[0])
        return Loss(F.cross_entropy(out.flatten(0, 1).float(), batch.flatten() % 7, reduction="sum"), batch.numel())


class Gan(Small):
    validates: ClassVar[bool] = False

    def nets(self):
        generator = nn.Sequential(
            nn.ConvTranspose1d(8, 16, 4, 2, 1), nn.LeakyReLU(0.1), nn.ConvTranspose1d(16, 1, 4, 2, 1), nn.Tanh()
        )
        judge = nn.Sequential(nn.Conv1d(1, 16, 5, 2, 2), nn.LeakyReLU(0.1), nn.Conv1d(16, 1, 5, 2, 2))
        return {"generator": generator, "judge": judge}

    def batch(self, shape):
        return {"z": torch.randn(shape.items, 8, 64), "real": torch.randn(shape.items, 1, 256)}

    def turns(self, optimizers):
        return [
            Turn(name="judge", loss=self.judge_loss, optimizers=("judge",)),
            Turn(name="generator", loss=self.generator_loss, optimizers=("generator",)),
        ]

    def fake(self, nets, batch, shared):
        if "fake" not in shared:
            shared["fake"] = nets["generator"](batch["z"])
        return shared["fake"]

    def judge_loss(self, nets, batch, shared):
        real, fake = nets["judge"](batch["real"]), nets["judge"](self.fake(nets, batch, shared).detach())
        return Loss((1 - real).square().mean((1, 2)).sum() + fake.square().mean((1, 2)).sum(), len(real))

    def generator_loss(self, nets, batch, shared):
        fake = self.fake(nets, batch, shared)
        return {
            "adversarial": Loss((1 - nets["judge"](fake)).square().mean((1, 2)).sum(), len(fake)),
            "near": Loss((fake - batch["real"]).abs().mean((1, 2)).sum(), len(fake)),
        }

    def units(self, batch):
        return {name: len(batch["z"]) for name in ("judge", "adversarial", "near")}


class Checkpointed(Transformer):
    """The DiT with every block recomputed."""

    checkpoint: str = "all"


JOBS = {
    "convolution": Convolution,
    "unet": UNet,
    "dit": Transformer,
    "decoder": Decoder,
    "recurrent": Recurrent,
    "gan": Gan,
    "checkpointed": Checkpointed,
}
SHAPES = {
    "convolution": (6, None),
    "unet": (3, None),
    "dit": (3, 40),
    "decoder": (4, None),
    "recurrent": (5, None),
    "gan": (5, None),
    "checkpointed": (3, 40),
}
