"""Low-rank adapters (Hu et al. 2021): a frozen linear layer plus a trained product of two thin ones, at scale 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """base(x) + up(down(x)); ``up`` starts at 0."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=1 / rank)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.base(x), self.up(self.down(x)))


def adapt(net: nn.Module, names: tuple[str, ...], rank: int) -> None:
    """Freezes the net and puts an adapter on every linear layer of these names."""
    net.requires_grad_(False)
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank))
