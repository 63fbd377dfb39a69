"""How an optimizer's step is carried out: a loop over tensors, all of them at once, or one fused kernel.

The rule that is learned is the same. ``foreach`` makes temporaries as large as the parameters, ``fused`` none.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch.optim import Adam, AdamW, Optimizer

from memfit.plan import IMPLEMENTATIONS

FUSED = (Adam, AdamW)
"""Whose fused kernels can be traced; torch 2.13 has no shape functions for the others'."""


def supports(optimizer: Optimizer, implementation: str) -> bool:
    """Whether this optimizer, one of PyTorch's own, can be carried out so."""
    if implementation == "fused" and not isinstance(optimizer, FUSED):
        return False
    accepted = inspect.signature(type(optimizer).__init__).parameters
    key = "foreach" if implementation == "loop" else implementation
    return type(optimizer).__module__.startswith("torch.optim") and key in accepted and key in optimizer.defaults


def implementation_of(optimizer: Optimizer, cuda: bool) -> str | None:
    """How a step is carried out now; None where the optimizer has but one way."""
    if not supports(optimizer, "foreach"):
        return None
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    return "foreach" if group["foreach"] or (group["foreach"] is None and cuda) else "loop"


def with_implementation(optimizers: Mapping[str, Optimizer], implementation: str) -> dict[str, Optimizer]:
    """The same optimizers, made again to be carried out so, where they can be; call it before their first step."""
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
