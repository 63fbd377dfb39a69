"""Between which numbers integers lie whose values are not known: the classes that ``argmax`` of ten scores gives are 0
to 9.

So many of them differ at most, however many there are. ``memfit.trace.range_operators`` follows what is known of which
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.value_masks import tensor_version

RANGE = "_memfit_range"
"""Attribute of a fake tensor: the ``IntegerRange`` of its elements."""


@dataclass(frozen=True, kw_only=True)
class IntegerRange:
    """The least number and the largest one.

    Attributes:
        version: of the tensor, whose writes end what is known.
        is_attained: whether both numbers are among the tensor's elements.
    """

    least: int
    largest: int
    version: int = 0
    is_attained: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> IntegerRange:
        return self


_TRUTH = IntegerRange(least=0, largest=1)


def range_of(tensor: Any) -> IntegerRange | None:
    """Between which numbers a tensor's integers lie; None where that is not known."""
    if not isinstance(tensor, Tensor):
        return None
    if tensor.dtype is torch.bool:
        return _TRUTH
    between: IntegerRange | None = tensor.__dict__.get(RANGE)
    return between if between is not None and between.version == tensor_version(tensor) else None


def note_range(tensor: Tensor, least: int, largest: int, version: int = 0, *, is_attained: bool = False) -> None:
    """Notes between which numbers the integers of a tensor lie that an operator gives.

    Args:
        version: of what it is a view of; 0 for a new tensor.
        is_attained: whether both numbers are among its elements.
    """
    tensor.__dict__[RANGE] = IntegerRange(least=least, largest=largest, version=version, is_attained=is_attained)


def size_of(between: IntegerRange) -> int:
    """How many numbers there are from the least to the largest."""
    return between.largest - between.least + 1


def most_different(tensor: Tensor) -> int:
    """How many values a tensor holds at most."""
    between = range_of(tensor)
    return tensor.numel() if between is None else min(tensor.numel(), size_of(between))
