"""How often each value is among integers that are not known: experts that a router chooses, classes, codes of a book.

A script cuts tokens by such counts, or skips an expert that got none. All counts together are the number of integers,
so that a trace takes an equal share for each value, as it does where a line selects by one value after another
(``memfit.device.virtual.value_masks``). Where ``unique`` is taken to find as many values as elements, each is there
once; where it finds all numbers that the integers lie between, these are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.integer_ranges import INTEGERS, range_of, size_of
from memfit.torch_compat import FakeTensor, disable_current_modes
from memfit.trace.constant_values import know, value_of

_aten = torch.ops.aten
_BINCOUNT = _aten.bincount.default
_UNIQUE = _aten._unique2.default
COUNTS = frozenset(
    {
        _BINCOUNT, _UNIQUE, _aten.unique_dim.default, _aten.unique_consecutive.default,
        _aten.unique_dim_consecutive.default,
    }
)  # fmt: skip
"""Operators that count values, or can."""


def know_counts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Notes what an operator of ``COUNTS`` is taken to have counted of integers that are not known."""
    if func is not _BINCOUNT:
        values, times = result[0], result[-1]
        if func is _UNIQUE and (between := range_of(args[0])) and values.numel() == size_of(between):
            with disable_current_modes():
                know(values, torch.arange(between.least, between.largest + 1).to(values.dtype))
        if func is _UNIQUE and 1 < times.numel() < args[0].numel():
            know_equal_counts(times, "unique", args[0].numel())
        elif times.numel():
            with disable_current_modes():
                know(times, torch.ones(tuple(times.shape), dtype=times.dtype))
        return
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    if weights is None and value_of(args[0]) is None and result.numel() > 1:
        know_equal_counts(result, "bincount", args[0].numel())


def know_equal_counts(counts: Tensor, operator: str, elements: int) -> None:
    """Notes that so many elements are counted, with an equal share for each value, as an assumption.

    Args:
        counts: integers, one for each value.
    """
    if not isinstance(counts, FakeTensor) or counts.dtype not in INTEGERS:
        return
    values = counts.numel()
    each, more = divmod(elements, values)
    with disable_current_modes():
        content = torch.full((values,), each, dtype=counts.dtype)
        content[:more] += 1
        know(counts, content.view(tuple(counts.shape)))
    most, share = each + (more > 0), f"{elements:,} for each of {values} values"
    assumptions: Any = counts.fake_mode.assumptions  # type: ignore[attr-defined]
    assumptions.note(operator, f"{most}, an equal share of {share}", most=most, share=share)
