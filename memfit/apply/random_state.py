"""The random state of a process: torch's on the CPU and on one device, Python's and NumPy's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memfit.torch_compat import disable_current_modes


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """The states of the generators at one moment."""

    cpu: np.ndarray
    cuda: Tensor | None
    python: Any
    numpy: Any


def random_state(device: torch.device) -> RandomState:
    """Returns the present state."""
    with disable_current_modes():
        cuda = torch.cuda.get_rng_state(device) if _on_cuda(device) else None
        return RandomState(
            cpu=torch.get_rng_state().numpy().copy(),
            cuda=cuda,
            python=random.getstate(),
            numpy=np.random.get_state(),
        )


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Restores a state."""
    with disable_current_modes():
        torch.set_rng_state(torch.from_numpy(state.cpu))
        if state.cuda is not None:
            torch.cuda.set_rng_state(state.cuda, device)
    random.setstate(state.python)
    np.random.set_state(state.numpy)


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.device_count() > 0
