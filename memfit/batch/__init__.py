"""Batches: a data set's size or lengths go in, windows of sample ids for every rank come out.

Every sample occurs once an epoch, on one rank; short windows are filled, kept or left out, as the plan says.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "LengthBatchSampler": "length_sampler",
    "PaddedCost": "cost",
    "as_lengths": "lengths",
    "audio_lengths": "lengths",
    "batch_loader": "length_sampler",
    "column_lengths": "lengths",
    "fit_cost": "cost",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Public names, imported on first use: some of them need torch, others must not wait for it."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
