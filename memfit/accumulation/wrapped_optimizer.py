"""The optimizer of torch inside of a framework's wrapper."""

from __future__ import annotations

from typing import Any

WRAPPERS = {"AcceleratedOptimizer": "accelerate", "LightningOptimizer": "lightning", "_FabricOptimizer": "lightning"}
"""Classes whose ``optimizer`` is the one that steps, and the package of each. They have no hooks of their own."""


def unwrapped(optimizer: Any) -> Any:
    """What a wrapper of Accelerate or Lightning holds; anything else as it is."""
    for kind in type(optimizer).__mro__:
        package = WRAPPERS.get(kind.__name__)
        if package is not None and package in kind.__module__.partition(".")[0]:
            return unwrapped(optimizer.optimizer)
    return optimizer
