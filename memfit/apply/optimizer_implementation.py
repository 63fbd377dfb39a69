"""How an optimizer's step is carried out: a loop over tensors, multi-tensor kernels (foreach), or a fused kernel.

The update rule is the same. ``foreach`` makes temporaries as large as the parameters, ``fused`` makes none.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch.optim import Adam, AdamW, Optimizer

from memfit.plan import IMPLEMENTATIONS

FUSED = (Adam, AdamW)
"""Optimizers whose fused kernels can be traced; torch 2.13 has no shape functions for the others."""


def supports(optimizer: Optimizer, implementation: str) -> bool:
    """Whether this optimizer is one of PyTorch's own that has this implementation."""
    if implementation == "fused" and not isinstance(optimizer, FUSED):
        return False
    accepted = inspect.signature(type(optimizer).__init__).parameters
    key = "foreach" if implementation == "loop" else implementation
    return type(optimizer).__module__.startswith("torch.optim") and key in accepted and key in optimizer.defaults


def implementation_of(optimizer: Optimizer, cuda: bool) -> str | None:
    """The implementation of an optimizer's step; None if the optimizer has only one."""
    if not supports(optimizer, "foreach"):
        return None
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    return "foreach" if group["foreach"] or (group["foreach"] is None and cuda) else "loop"


def with_implementation(optimizers: Mapping[str, Optimizer], implementation: str) -> dict[str, Optimizer]:
    """Returns the optimizers rebuilt with this implementation, if they support it. Call it before their first step."""
    if implementation == "job":
        return dict(optimizers)
    assert implementation in IMPLEMENTATIONS
    return {
        name: _made_again(optimizer, implementation) if supports(optimizer, implementation) else optimizer
        for name, optimizer in optimizers.items()
    }


def _made_again(optimizer: Optimizer, implementation: str) -> Optimizer:
    kind = {"foreach": implementation == "foreach"}
    if "fused" in optimizer.defaults:
        kind["fused"] = implementation == "fused"
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    groups = [{**group, **kind} for group in optimizer.param_groups]
    again: Optimizer = type(optimizer)(groups, **{**defaults, **kind})
    return again
