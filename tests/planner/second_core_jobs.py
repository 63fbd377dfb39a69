"""Jobs whose traces depend on more than their arguments, or fail."""

import os
import random

import torch

from testing.large_nets import Dit

random.seed(0)


class Small(Dit):
    """A net that has to recompute on a small budget."""

    dim: int = 64
    depth: int = 8
    heads: int = 4
    frames: int = 512


class Drawn(Small):
    """Python's random numbers decide what a micro-batch allocates."""

    def loss(self, nets, batch):
        self.noise = torch.zeros(random.randint(1, 1 << 20), device=next(iter(nets.values())).into.weight.device)
        return super().loss(nets, batch)


class Hoarding(Small):
    """Every micro-batch leaves a storage of its own behind."""

    def loss(self, nets, batch):
        kept = self.__dict__.setdefault("kept", [])
        kept.append(torch.zeros(1 << 18, device=next(iter(nets.values())).into.weight.device))
        return super().loss(nets, batch)


class Refusing(Small):
    """Its validation raises."""

    validates = True

    def validate(self, nets, batch):
        raise ValueError("no validation of this job")


class Parted(Small):
    """Its traces fail in every process but the first."""

    first = os.getpid()

    def loss(self, nets, batch):
        if os.getpid() != self.first:
            raise ValueError("not in a copy")
        return super().loss(nets, batch)
