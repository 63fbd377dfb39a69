"""torch's own function below ``pad_packed_sequence``, and a context that replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FUNCTIONS: Any = torch._VF
_NAME = "_pad_packed_sequence"


@contextmanager
def unpacking_replaced(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context in which ``pad_packed_sequence`` calls another function.

    Args:
        make: that function of torch's own, with which it shares the arguments (data, batch_sizes, batch_first,
            padding_value, total_length) and what it returns: (padded data, lengths).
    """
    setattr(_FUNCTIONS, _NAME, make(getattr(_FUNCTIONS, _NAME)))
    try:
        yield
    finally:
        delattr(_FUNCTIONS, _NAME)  # torch's own is an attribute of what this one stands for
