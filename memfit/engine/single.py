"""One rank: everything is here already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.job import Job, Nets


@dataclass(frozen=True, kw_only=True)
class Single:
    """The engine of one rank."""

    name: str = "single"
    rank: int = 0
    world: int = 1
    mesh: None = None
    lockstep: bool = False

    def place(self, job: Job, nets: Nets) -> Nets:
        """The nets as they are."""
        return nets

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """One rank carries every job."""

    def accumulating(self, nets: Nets, last: bool) -> AbstractContextManager[Any]:
        """Nothing to do."""
        return nullcontext()

    def prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing is needed."""

    def reduce(self, prepared: None) -> None:
        """Gradients are whole already."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """torch's own."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer: Optimizer) -> None:
        """One step."""
        optimizer.step()

    def share_buffers(self, nets: Nets) -> None:
        """They are rank 0's."""
