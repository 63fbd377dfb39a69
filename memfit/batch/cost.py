"""Padded cost of a micro-batch: ``linear·B·L + quadratic·B·L²`` for B items padded to length L.

The linear term is what grows with padded units (activations of convolutions and projections), the quadratic one what
grows with the square of the length (unfused attention). The default counts padded units themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.errors import InputError
from memfit.job import Shape


@dataclass(frozen=True, kw_only=True)
class PaddedCost:
    """Cost of one micro-batch, in any unit (padded frames by default; bytes, when it comes from a trace)."""

    linear: float = 1.0
    """Cost of one padded unit."""
    quadratic: float = 0.0
    """Cost of one squared padded unit of one item."""

    def __post_init__(self) -> None:
        usable = all(math.isfinite(value) and value >= 0 for value in (self.linear, self.quadratic))
        if not usable or self.linear == self.quadratic == 0:
            raise InputError(
                f"cost {self.linear:g}·B·L + {self.quadratic:g}·B·L²",
                "a batch must cost something, and no part of it less than nothing",
                "write coefficients of 0 or more, one of them above 0",
            )

    def of(self, items: np.ndarray | int, length: np.ndarray | float) -> np.ndarray:
        """Cost of ``items`` samples padded to ``length``; arrays are taken element by element."""
        padded = np.asarray(length, dtype=np.float64)
        each = self.linear * padded
        if self.quadratic:
            each = each + self.quadratic * padded**2
        return each * items

    def most_items(self, length: np.ndarray | float, budget: float) -> np.ndarray:
        """The most items of this length whose cost is at most ``budget``; int64, 0 where one is already too much."""
        each = self.of(1, length)
        most = np.floor(budget / each)
        most -= most * each > budget
        return most.astype(np.int64)


def fit_cost(shapes: Sequence[Shape], costs: Sequence[float]) -> tuple[PaddedCost, float]:
    """The padded cost and the fixed part that explain measured costs (bytes of traced steps, say) of some shapes.

    Non-negative least squares of ``fixed + linear·B·L + quadratic·B·L²``. A budget for the sampler is then
    ``limit - fixed``.

    Raises:
        InputError: fewer than three shapes, or shapes that cannot tell the three parts apart.
    """
    from scipy.optimize import nnls

    items = np.array([shape.items for shape in shapes], dtype=np.float64)
    lengths = np.array([shape.length or 1 for shape in shapes], dtype=np.float64)
    columns = np.stack([np.ones_like(items), items * lengths, items * lengths**2], axis=1)
    scale = columns.max(axis=0, initial=1.0)
    if len(shapes) != len(costs) or np.linalg.matrix_rank(columns / scale) < 3:
        raise InputError(
            f"{len(shapes)} shapes and {len(costs)} costs",
            "they cannot tell the fixed, the linear and the quadratic part apart",
            "measure at least three shapes of different items and lengths, one cost for each",
        )
    (fixed, linear, quadratic), _ = nnls(columns / scale, np.asarray(costs, dtype=np.float64))
    return PaddedCost(linear=float(linear / scale[1]), quadratic=float(quadratic / scale[2])), float(fixed / scale[0])
