"""torch.optim.LBFGS: its history is full from the first step on.

The history gets a direction and a step with each iteration whose curvature is positive, until it has ``history_size``
of both; then the oldest go. A trace has no curvature, and does few iterations. What a long run keeps is therefore put
there before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim import LBFGS

from memfit.device.virtual.patching import replaced


@contextmanager
def full_histories(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which every LBFGS begins its first step with a full history.

    Args:
        note: is told how many vectors that is.
    """
    step = LBFGS.step

    @wraps(step)
    def step_with_history(self: LBFGS, closure: Any) -> Any:
        state = self.state[self._params[0]]
        if "old_dirs" not in state:
            state.update(_history(self))
            count = len(state["old_dirs"])
            note(
                f"the history of torch.optim.LBFGS was taken to be full, with {count} directions and {count} steps; "
                "a run of fewer iterations needs less"
            )
        return step(self, closure)

    with replaced(LBFGS, step=step_with_history):
        yield


def _history(optimizer: LBFGS) -> dict[str, Any]:
    """What an LBFGS of torch keeps after ``history_size`` iterations: vectors of as many numbers as it learns."""
    parameters, group = optimizer._params, optimizer.param_groups[0]
    count = sum(parameter.numel() for parameter in parameters)
    dtype = parameters[0].dtype
    for parameter in parameters[1:]:
        dtype = torch.promote_types(dtype, parameter.dtype)

    def vector() -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=parameters[0].device)

    def vectors() -> list[torch.Tensor]:
        return [vector() for _ in range(group["history_size"])]

    with torch.no_grad():
        return {
            "func_evals": 1,
            "n_iter": 1,
            "d": vector(),
            "t": group["lr"],
            "old_dirs": vectors(),
            "old_stps": vectors(),
            "ro": [torch.zeros((), dtype=dtype, device=parameters[0].device) for _ in range(group["history_size"])],
            "H_diag": 1,
            "prev_flat_grad": vector(),
            "prev_loss": 0.0,
        }
