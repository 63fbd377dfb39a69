"""Weight normalisation (Salimans and Kingma 2016): weight = g v / |v|, a norm for each index of its first dimension.

The computed weight stays an attribute of its layer until the next forward, as it does with torch's hook of the same
name: between steps it is memory that is neither parameter nor gradient.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def weight_norm(layer: Layer) -> Layer:
    """The layer with ``weight`` replaced by the parameters ``weight_g`` and ``weight_v``."""
    weight: Any = layer.weight
    del layer.weight
    layer.weight_g = nn.Parameter(torch.norm_except_dim(weight.detach(), 2, 0))
    layer.weight_v = nn.Parameter(weight.detach())
    layer.register_forward_pre_hook(_compute)
    return layer


def _compute(layer: Any, inputs: tuple[Any, ...]) -> None:
    layer.weight = torch._weight_norm(layer.weight_v, layer.weight_g, 0)
