"""A GAN on drawn waves: two nets, two optimizers, and two turns in each step.

memfit predict examples/gan.py:Waves --device rtx4090 --micro-batch 256
"""

import torch
from torch import nn

import memfit


class Waves(memfit.Job):
    samples: int = 1024

    def nets(self):
        sizes = {"discriminator": (self.samples, 1), "generator": (64, self.samples)}
        return {name: nn.Sequential(nn.Linear(a, 512), nn.ReLU(), nn.Linear(512, b)) for name, (a, b) in sizes.items()}

    def optimizers(self, nets):
        return {name: torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.99)) for name, net in nets.items()}

    def turns(self, optimizers):
        return [memfit.Turn(name=name, loss=getattr(self, name), optimizers=(name,)) for name in optimizers]

    def discriminator(self, nets, real, shared):
        judge, drawn = nets["discriminator"], self.draw(nets, real).detach()
        return nn.functional.softplus(torch.cat([-judge(real), judge(drawn)])).sum(), len(real)

    def generator(self, nets, real, shared):
        return nn.functional.softplus(-nets["discriminator"](self.draw(nets, real))).sum(), len(real)

    def draw(self, nets, real):
        return nets["generator"](torch.randn_like(real[:, :64]))

    def batch(self, shape):
        return torch.randn(shape.items, self.samples)

    def dataset(self):
        return torch.sin(torch.linspace(5, 50, 512)[:, None] * torch.linspace(0, 1, self.samples))
