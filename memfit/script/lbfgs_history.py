"""torch.optim.LBFGS: its history is full from the first step on.

The history gets a direction and a step with each iteration whose curvature is positive, until it has ``history_size``
of both; then the oldest go. A trace has no curvature, and does few iterations. What a long run keeps is therefore put
there before the first step. A run whose steps were all seen, and make fewer iterations, is traced once more with as
many as they make at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.optim import LBFGS

from memfit.device.virtual.patching import replaced


class Histories:
    """The histories of a script's LBFGS optimizers.

    Args:
        note: is told how many vectors a history has.
        most: iterations that the run makes at most; None: as many as fill a history.
    """

    def __init__(self, note: Callable[[str], None], most: int | None) -> None:
        self._note, self._most = note, most
        self._iterations = 0
        self._largest = 0

    @property
    def iterations(self) -> int | None:
        """Iterations that the steps make at most, where these do not fill a history; None where they do."""
        return self._iterations if self._iterations < self._largest else None

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Context in which every LBFGS begins its first step with a history."""
        step = LBFGS.step

        @wraps(step)
        def step_with_history(optimizer: LBFGS, closure: Any) -> Any:
            size = optimizer.param_groups[0]["history_size"]
            self._iterations += optimizer.param_groups[0]["max_iter"]
            self._largest = max(self._largest, size)
            state = optimizer.state[optimizer._params[0]]
            if "old_dirs" not in state:
                count = size if self._most is None else min(size, self._most)
                optimizer.param_groups[0]["history_size"] = (
                    count  # what the trace's own steps add takes old ones' places
                )
                state.update(_history(optimizer, count))
                taken = "full, with" if count == size else "as long as its steps can make it, with"
                self._note(
                    f"the history of torch.optim.LBFGS was taken to be {taken} {count} directions and {count} steps; "
                    "a run of fewer iterations needs less"
                )
            return step(optimizer, closure)

        with replaced(LBFGS, step=step_with_history):
            yield


def _history(optimizer: LBFGS, length: int) -> dict[str, Any]:
    """What an LBFGS of torch keeps after ``length`` iterations: vectors of as many numbers as it learns."""
    parameters, group = optimizer._params, optimizer.param_groups[0]
    count = sum(parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters)
    dtype = parameters[0].dtype.to_real()  # it learns the two parts of complex numbers
    for parameter in parameters[1:]:
        dtype = torch.promote_types(dtype, parameter.dtype.to_real())

    def vector() -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=parameters[0].device)

    def vectors() -> list[torch.Tensor]:
        return [vector() for _ in range(length)]

    with torch.no_grad():
        return {
            "func_evals": 1,
            "n_iter": 1,
            "d": vector(),
            "t": group["lr"],
            "old_dirs": vectors(),
            "old_stps": vectors(),
            "ro": [torch.zeros((), dtype=dtype, device=parameters[0].device) for _ in range(length)],
            "H_diag": 1,
            "prev_flat_grad": vector(),
            "prev_loss": 0.0,
        }
