"""The job whose largest micro-batch BatchSizeFinder and ``memfit probe`` look for in bench.library_remedies."""

from __future__ import annotations

import torch
from torch import nn

import memfit


class LimitedNet(memfit.Job):
    """A perceptron of four layers; its activations grow with the batch, its weights take 4 MiB with AdamW's state."""

    unit, longest = "samples", None
    width: int = 256

    def nets(self):
        layers = [part for _ in range(4) for part in (nn.Linear(self.width, self.width), nn.GELU())]
        return {"net": nn.Sequential(*layers)}

    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW(nets["net"].parameters())}

    def batch(self, shape):
        return torch.zeros(shape.items, self.width)

    def loss(self, nets, batch):
        return memfit.Loss(nets["net"](batch).square().mean(1).sum(), len(batch))
