"""Between which numbers integers lie whose values are not known: the classes that ``argmax`` of ten scores gives are 0
to 9.

So many of them differ at most, however many there are. ``memfit.trace.range_operators`` follows what is known of which
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.value_masks import tensor_version

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
"""Types of integers that are followed."""
RANGE = "_memfit_range"
"""Attribute of a fake tensor: the ``IntegerRange`` of its elements."""


@dataclass(frozen=True, kw_only=True)
class IntegerRange:
    """The least number and the largest one.

    Attributes:
        version: of the tensor, whose writes end what is known.
        has_least: whether the least number is among the tensor's elements.
        has_largest: whether the largest number is.
        has_row_of_ones: of a mask: whether a row in the last dimension is of 1 alone, as that of an item without
            padding is.
    """

    least: int
    largest: int
    version: int = 0
    has_least: bool = False
    has_largest: bool = False
    has_row_of_ones: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> IntegerRange:
        return self

    @property
    def is_ones(self) -> bool:
        """Whether every element is 1."""
        return self.least == self.largest == 1

    @property
    def is_attained(self) -> bool:
        """Whether the least number or the largest one is among the tensor's elements."""
        return self.has_least or self.has_largest

    def with_bounds(self, least: int, largest: int) -> IntegerRange:
        """The range of numbers that follow from these in the same order."""
        return replace(self, least=least, largest=largest, has_row_of_ones=False)


_TRUTH = IntegerRange(least=0, largest=1)


def range_of(tensor: Any) -> IntegerRange | None:
    """Between which numbers a tensor's integers lie; None where that is not known."""
    if not isinstance(tensor, Tensor):
        return None
    between: IntegerRange | None = tensor.__dict__.get(RANGE)
    if between is not None and between.version == tensor_version(tensor):
        return between
    return _TRUTH if tensor.dtype is torch.bool else None


def note_range(tensor: Tensor, between: IntegerRange, version: int = 0) -> None:
    """Notes between which numbers the integers of a tensor lie that an operator gives; nothing where its type does not
    hold all of them.

    Args:
        version: of what it is a view of; 0 for a new tensor.
    """
    if between.largest >= between.least and _holds(tensor.dtype, between):
        tensor.__dict__[RANGE] = replace(between, version=version)


def largest_whole(dtype: torch.dtype) -> int:
    """The largest number up to which a type holds every whole number, and sums and differences of them with 1 too."""
    if dtype is torch.bool:
        return 1
    return int(1 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _holds(dtype: torch.dtype, between: IntegerRange) -> bool:
    if dtype.is_complex:
        return False
    largest = largest_whole(dtype)
    is_signed = dtype is not torch.bool and dtype.is_signed
    return between.largest <= largest and between.least >= (-largest - 1 if is_signed else 0)


def size_of(between: IntegerRange) -> int:
    """How many numbers there are from the least to the largest."""
    return between.largest - between.least + 1


def most_different(tensor: Tensor) -> int:
    """How many values a tensor holds at most."""
    between = range_of(tensor)
    return tensor.numel() if between is None else min(tensor.numel(), size_of(between))
