"""Distances between points that the host had: graphs of neighbours are made of them on the card.

``(torch.cdist(x, x) < radius).nonzero()`` has as many edges as the points of the batch give it. What the operators here
make of known points is known, too, though it is more numbers than others of which a trace keeps them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_DISTANCES = frozenset(
    {
        _aten.sub.Tensor, _aten.mul.Tensor, _aten.pow.Tensor_Scalar, _aten.sqrt.default, _aten.sum.dim_IntList,
        _aten.linalg_vector_norm.default, _aten.norm.ScalarOpt_dim, _aten._cdist_forward.default,
        _aten._euclidean_dist.default, _aten.topk.default, _aten.sort.default, _aten.sort.stable,
    }
)  # fmt: skip
MOST_DISTANCES = 1 << 22
"""Numbers of a result that is followed: distances between 2,000 points."""


def may_be_distances(func: Any) -> bool:
    """Whether an operator makes distances of points, or sorts them."""
    return func in _DISTANCES


def are_distances(func: Any, made: Any) -> bool:
    """Whether a result may be followed as distances, if what it is made of is known."""
    return func in _DISTANCES and isinstance(made, Tensor) and made.numel() <= MOST_DISTANCES
