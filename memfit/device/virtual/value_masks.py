"""Masks of one value, ``ids == 3``, that code makes of the same integers one after another: of experts or classes.

No element is in the masks of two values, so that all masks together hold each element once at most. A trace that took
all elements for each of them would have as many times too many as there are values. So where one line selects by one
value after another, another trace takes an equal share for each (``Walks``). A line that selects by one value alone is
taken to find all. ``memfit.trace.mask_operators`` follows which masks are of which values.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import disable_current_modes
from memfit.torch_compat.attributes import version_of

VALUES = "_memfit_values"
"""Attribute of a fake tensor: the ``ValueMask`` that says where it may be other than zero."""

_MOST = "_memfit_most_true"
"""Attribute of a fake mask: (how many of its elements are true at most, its version)."""


class Integers:
    """Integers of which nothing is known."""

    def __init__(self) -> None:
        self.selected: dict[str, set[int]] = {}
        """The values that were selected, by the place in the code."""
        self.divisors: dict[int, int] = {}
        """How many values share the elements with one, where it was selected."""


@dataclass(frozen=True, kw_only=True)
class ValueMask:
    """Where a tensor may be other than zero.

    Attributes:
        integers: what was compared with values.
        labels: for each element of the tensor, the value where it may be other than zero. Real; it has strides of 0
            along dimensions of one value.
        most: the elements other than zero at most, of all values together.
        version: of the tensor, whose writes end what is known.
        is_one_hot: whether these elements are 1, and there for every integer: their sums count the values.
    """

    integers: Integers
    labels: Tensor
    most: int
    version: int
    is_one_hot: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ValueMask:
        return self

    @property
    def values(self) -> int:
        """How many values there are."""
        strides = zip(self.labels.shape, self.labels.stride(), strict=True)
        return torch.Size([size for size, stride in strides if stride]).numel()

    @property
    def value(self) -> int:
        """The value, of a mask that has one."""
        with disable_current_modes():
            return int(self.labels.as_strided((), ()))


_integers: weakref.WeakKeyDictionary[Any, dict[tuple[int, int, int], Integers]] = weakref.WeakKeyDictionary()


def integers_of(tensor: Tensor) -> Integers:
    """What is noted of the integers of a tensor, and of views of all of it, until they are written to."""
    noted = _integers.setdefault(tensor.untyped_storage(), {})
    return noted.setdefault((tensor_version(tensor), int(tensor.storage_offset()), tensor.numel()), Integers())


def note_mask(
    tensor: Tensor, integers: Integers, labels: Tensor, most: int, version: int = 0, *, is_one_hot: bool = False
) -> None:
    """Notes where a tensor that an operator gives may be other than zero.

    Args:
        version: of the tensor after the operator: that of what it is a view of, or one more than before a write.
            Autograd sets it after that.
    """
    tensor.__dict__[VALUES] = ValueMask(
        integers=integers, labels=labels, most=most, version=version, is_one_hot=is_one_hot
    )


def mask_of(tensor: Any) -> ValueMask | None:
    """Where a tensor may be other than zero; None where nothing is known of that."""
    mask: ValueMask | None = tensor.__dict__.get(VALUES) if isinstance(tensor, Tensor) else None
    if mask is None or mask.version != tensor_version(tensor) or mask.labels.shape != tensor.shape:
        return None
    return mask


def note_most(mask: Tensor, most: int) -> None:
    """Notes how many elements of a mask of which nothing else is known are true at most."""
    mask.__dict__[_MOST] = min(most, most_true(mask)), tensor_version(mask)


def most_true(mask: Tensor) -> int:
    """How many elements of a mask are true at most: all of them, where nothing is known."""
    most, version = mask.__dict__.get(_MOST, (mask.numel(), 0))
    return int(most) if version == tensor_version(mask) else mask.numel()


def tensor_version(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 in inference mode, which does not count it."""
    return 0 if tensor.is_inference() else version_of(tensor)


@dataclass(kw_only=True)
class Walks:
    """Places of the code that select by one value after another of the same integers.

    Attributes:
        assumed: how many values each place is taken to select, from the trace before.
    """

    assumed: Mapping[str, int] = field(default_factory=dict)
    _seen: dict[str, list[set[int]]] = field(default_factory=dict)
    """By place, the values of one tensor of integers after another."""

    def divisor(self, integers: Integers, value: int, place: str) -> int:
        """How many values share the elements, of which one is selected. It stays the same wherever it is selected."""
        if place not in integers.selected:
            integers.selected[place] = set()
            self._seen.setdefault(place, []).append(integers.selected[place])
        integers.selected[place].add(value)
        return integers.divisors.setdefault(value, self.assumed.get(place, 1))

    def observed(self) -> dict[str, int]:
        """How many values each place selects, where it selects several of all tensors of integers: the least of them.

        The last of several tensors is left out: the trace may have ended before all of its values were selected.
        """
        least = {place: min(map(len, seen[:-1] or seen)) for place, seen in self._seen.items()}
        return {place: count for place, count in least.items() if count > 1}
