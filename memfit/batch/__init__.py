"""Batches: what a window learns from, samplers that give every sample once, and the audit that counts it."""

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
