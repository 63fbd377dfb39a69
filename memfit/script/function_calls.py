"""Finds forwards of nets that are functions of their weights, not modules: ``torch.tanh(x @ W1) @ W2``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mv.default,
        _aten.linear.default, _aten.convolution.default, _aten.embedding.default, _aten.index.Tensor,
    }
)  # fmt: skip
"""Operators that multiply data by weights, or look weights up: an average of weights or their norm needs none."""


def multiplies_data(args: Any, number_of: Callable[[Tensor], int | None], weights: Collection[int]) -> bool:
    """Whether one of PRODUCTS takes a weight, and a tensor that is none.

    Args:
        number_of: returns the number of a tensor's storage.
        weights: the numbers of those of the trained weights.
    """
    parts = (part for argument in args for part in (argument if isinstance(argument, list | tuple) else (argument,)))
    are_weights = {number_of(part) in weights for part in parts if isinstance(part, Tensor)}
    return are_weights == {True, False}
