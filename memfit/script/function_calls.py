"""Finds forwards of nets that are functions of their weights, not modules: ``torch.tanh(x @ W1) @ W2``."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memfit.nested_tensors import tensors_in

_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mv.default,
        _aten.linear.default, _aten.convolution.default, _aten.embedding.default, _aten.index.Tensor,
    }
)  # fmt: skip
"""Operators that multiply data by weights, or look weights up: an average of weights or their norm needs none."""


@dataclass(kw_only=True)
class FunctionCalls:
    """Sees which products are forwards: those of a trained weight and data.

    What was made of weights alone, as the update of an adapter that is merged (``scale * B @ A``), is no data.

    Attributes:
        number_of: returns the number of a tensor's storage.
    """

    number_of: Callable[[Tensor], int | None]
    _made_of_weights: set[int] = field(default_factory=set)

    def multiplies_data(self, func: Any, args: Any, weights: Set[int]) -> bool:
        """Whether the operator is one of PRODUCTS, and takes a trained weight and data.

        Args:
            weights: the numbers of the storages of trained weights.
        """
        if func not in PRODUCTS:
            return False
        given = list(tensors_in(args))
        trained = any(self.number_of(part) in weights for part in given)
        return trained and not all(self._is_of_weights(part, weights) for part in given)

    def made(self, args: Any, result: Any, weights: Set[int]) -> None:
        """Notes the result of an operator, where nothing but weights went into it."""
        given = list(tensors_in(args)) if weights else []
        if given and all(self._is_of_weights(part, weights) for part in given):
            numbers = (self.number_of(made) for made in tensors_in(result))
            self._made_of_weights.update(number for number in numbers if number is not None)

    def _is_of_weights(self, tensor: Tensor, weights: Set[int]) -> bool:
        number = self.number_of(tensor)
        return isinstance(tensor, nn.Parameter) or number in weights or number in self._made_of_weights
