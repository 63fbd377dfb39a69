"""One rank: everything is here already."""

from __future__ import annotations

import copy
import warnings
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
    steps_together: bool = False
    spread: bool = False

    def place(self, job: Job, nets: Nets) -> Nets:
        """The nets as they are."""
        return nets

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Copies of all of them."""
        return copied(nets)

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """One rank carries every job."""

    def divide(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """There is one rank."""

    def accumulating(self, nets: Nets, last: bool) -> AbstractContextManager[Any]:
        """Nothing to do."""
        return nullcontext()

    def prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing is needed."""

    def reduce(self, prepared: None) -> None:
        """Gradients are whole already."""

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The whole sums."""
        return [p.grad for p in parameters if p.grad is not None]

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """torch's own."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer: Optimizer) -> None:
        """One step."""
        optimizer.step()

    def stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """Its parameters."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self, optimizer: Optimizer) -> None:
        """torch's own."""
        optimizer.zero_grad(set_to_none=True)

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """They are here."""
        return dict(net.state_dict())

    def share_buffers(self, nets: Nets) -> None:
        """They are rank 0's."""


def copied(nets: Nets) -> Nets:
    """Copies of the trained nets, which are not trained themselves."""
    return {name: _copy(net) for name, net in nets.items() if any(p.requires_grad for p in net.parameters())}


def _copy(net: nn.Module) -> nn.Module:
    """A copy without gradients. Buffers are cloned first: a trace's tensors have no storage to copy."""
    copies: dict[int, Any] = {id(buffer): buffer.detach().clone() for buffer in net.buffers()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return copy.deepcopy(net, copies).requires_grad_(False)
