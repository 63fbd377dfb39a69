"""Numbers that a script copies from the host, and views of them, such as a table of boxes for a detector.

Of such a table, ``targets.to(device)``, one column says which image a box belongs to: ``targets[targets[:, 0] == i]``
has as many rows as the image has boxes. More of these numbers are followed than of others, which nets' weights and the
states of optimizers are made by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import FakeTensor
from memfit.trace.host_distances import MOST_DISTANCES

MOST_FROM_HOST = 1 << 15
"""Floating point numbers of at most so many elements are followed that the host had."""

_TO_COPY = torch.ops.aten._to_copy.default


def may_be_view_of_host(func: Any, out: Any) -> bool:
    """Whether an operator gives a view that may be one of such numbers, by its size."""
    return func.is_view and isinstance(out, Tensor) and out.numel() <= MOST_DISTANCES


def is_few_from_host(func: Any, args: Any, made: Any) -> bool:
    """Whether an operator copies so few numbers of the host to the card, or gives a view on the card of those, or of
    the distances that are made of them."""
    if not isinstance(made, Tensor):
        return False
    if func is _TO_COPY:
        return made.numel() <= MOST_FROM_HOST and not isinstance(args[0], FakeTensor)
    return bool(func.is_view) and made.numel() <= MOST_DISTANCES
