"""The private state that a gradient scaler keeps of each optimizer between ``unscale_`` and ``update``."""

from __future__ import annotations

from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

MAYBE_STEP = "_maybe_opt_step"
"""For patches: what steps unless an infinity was found."""


def allow_another_step(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Lets ``scaler.step`` be called again before ``update``, for a step that runs parameter by parameter."""
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED


def forget_optimizers(scaler: GradScaler) -> None:
    """Drops what was noted since the last ``update``, for a window that begins again."""
    scaler._per_optimizer_states.clear()


def has_infinity(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether ``unscale_`` met an infinity or NaN among the optimizer's gradients."""
    return any(flag.item() for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
