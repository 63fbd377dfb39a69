"""A dimension of a tensor of which each tensor-parallel rank has a part, and a call of an operator on such tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class MixedError(Exception):
    """An operator mixes what several ranks have.

    Args:
        reason: what it does, in words.
        parts: how many tensors, one after the other, the cut dimension may be instead; 0: that is not known.
    """

    def __init__(self, reason: str, parts: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.parts = reason, parts


@dataclass(frozen=True, kw_only=True)
class Split:
    """A dimension of a tensor of which each rank has a part.

    Attributes:
        dim: the dimension, which is ``outer`` times ``units`` times as many elements as each unit has.
        outer: how many times units are shared out one after the other, as those of a fused projection's parts are.
        units: what is shared out, such as heads; each rank has as many neighbouring ones.
        sources: the layers whose columns they are.
    """

    dim: int
    outer: int
    units: int
    sources: frozenset[str]


Splits = Callable[[Tensor], Split | None]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of an operator.

    Attributes:
        split_of: the split of an argument; None: every rank has the whole tensor.
        ranks: among which units are shared out.
        sums_gradients: whether gradients of whole tensors that meet parts here are summed over the ranks.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any
    split_of: Splits
    ranks: int
    sums_gradients: bool

    def argument(self, index: int, key: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(key, default)

    def shared_out(self, units: int, parts: int = 0) -> int:
        """The number of units.

        Raises:
            MixedError: ranks cannot have as many of them each.
        """
        if units % self.ranks:
            raise MixedError(f"{units} do not divide by {self.ranks}", parts)
        return units
