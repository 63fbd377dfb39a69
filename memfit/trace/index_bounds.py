"""Indices beyond what they are looked up in: positions of a sequence that is longer than its table of positions.

A fake tensor has no values, so that a lookup beyond the table would be predicted to fit. In a real run, torch raises on
a CPU, and a card's kernel asserts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.assumptions import source_line
from memfit.device.virtual.integer_ranges import range_of
from memfit.errors import InputError

_aten = torch.ops.aten
_FROM_END = _aten.index.Tensor
"""Counts negative indices from the end."""
_LOOKUPS = frozenset({_aten.embedding.default, _aten.index_select.default, _aten.gather.default, _FROM_END})


def looks_up(func: Any) -> bool:
    """Whether ``check_indices`` looks at this operator."""
    return func in _LOOKUPS


def check_indices(func: Any, args: Any) -> None:
    """Refuses a lookup by counted integers that lie beyond the rows.

    Raises:
        InputError: some of them do.
    """
    for rows, indices in _looked_up(func, args):
        between = range_of(indices)
        if between is None or not between.is_attained or not indices.numel() or indices.is_inference():
            continue  # in inference mode, writes that end what is known are not counted
        least = -rows if func is _FROM_END else 0
        is_beyond = between.has_largest and between.largest >= rows
        wrong = between.largest if is_beyond else between.least
        if is_beyond or (between.has_least and wrong < least):
            why = f"index {wrong} of a tensor that has {rows} rows, which torch refuses"
            raise InputError(f"a lookup at {source_line()[0]}", why, "ask for a shorter sequence, or make more rows")


def _looked_up(func: Any, args: Any) -> Iterator[tuple[int, Tensor]]:
    """(rows, indices of them) of each dimension that is looked up."""
    if func is _aten.embedding.default:
        yield args[0].shape[0], args[1]
    elif func is not _FROM_END:
        if args[0].dim():
            yield args[0].shape[args[1]], args[2]
    elif not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        yield from ((args[0].shape[dim], index) for dim, index in enumerate(args[1]) if index is not None)
