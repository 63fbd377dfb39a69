"""A diffusers U-Net that learns to draw discs: it predicts the noise in a noised picture.
memfit predict examples/unet.py:Discs --device rtx4090 --micro-batch 64
"""

import math

import torch
from diffusers import UNet2DModel

import memfit


class Discs(memfit.Job):
    size: int = 64
    width: int = 128
    ema = 0.999

    def nets(self):
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        sizes = {"sample_size": self.size, "block_out_channels": (self.width, 2 * self.width), "norm_num_groups": 8}
        return {"unet": UNet2DModel(down_block_types=down, up_block_types=up, **sizes)}

    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW(nets["unet"].parameters(), lr=1e-4)}

    def batch(self, shape):
        return torch.rand(shape.items, 3, self.size, self.size)

    def loss(self, nets, pictures):
        noise, time = torch.randn_like(pictures), torch.rand(len(pictures), device=pictures.device)
        angle = time[:, None, None, None] * math.pi / 2
        predicted = nets["unet"](pictures * angle.cos() + noise * angle.sin(), time * 1000).sample
        return memfit.Loss((predicted - noise).square().mean((1, 2, 3)).sum(), len(pictures))

    def dataset(self):
        x, y, radius, *colours = torch.rand(6, 512, 1, 1, generator=torch.Generator().manual_seed(0))
        at = torch.linspace(0, 1, self.size)
        disc = ((at - x) ** 2 + (at[:, None] - y) ** 2 < (radius / 3) ** 2).float()
        return torch.stack([disc * colour for colour in colours], dim=1)
