"""Jobs whose traces depend on more than their arguments, or fail."""

import importlib
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


class Importing(Small):
    """Its first step imports a module that keeps the step's tensors until garbage is collected."""

    def loss(self, nets, batch):
        held = torch.zeros(1 << 26, device=next(iter(nets.values())).into.weight.device)
        importlib.import_module("tests.planner.keeps_its_frames")
        loss = super().loss(nets, batch)
        return loss if held.numel() else None


_KEPT = {}


class Caching(Small):
    """Its module keeps a tensor of the first step for the next ones."""

    def loss(self, nets, batch):
        device = next(iter(nets.values())).into.weight.device
        if device not in _KEPT:
            _KEPT[device] = torch.zeros(1 << 22, device=device)
        _KEPT[device].sum()
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
