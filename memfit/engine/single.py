"""One rank: everything is here already."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memfit.engine.collectives import NOTHING
from memfit.engine.data_parallel_mixin import DataParallelMixin
from memfit.engine.torch_optim_mixin import TorchOptimMixin
from memfit.engine.torch_state_mixin import TorchStateMixin
from memfit.job import Job, Nets, is_trained


@dataclass(frozen=True, kw_only=True)
class Single(DataParallelMixin, TorchOptimMixin, TorchStateMixin):
    """The engine of one rank."""

    name: str = "single"
    rank: int = 0
    world: int = 1
    mesh: None = None
    syncs_in_backward: bool = False
    syncs_in_step: bool = False
    sharded_state: bool = False
    parts_on_host: bool = False

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

    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> AbstractContextManager[Any]:
        """Does nothing: there is one rank."""
        return NOTHING

    def prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Does nothing: a reduction on one rank needs no memory."""

    def reduce(self, prepared: None) -> None:
        """Gradients are whole already."""

    def share_buffers(self, nets: Nets) -> None:
        """They are rank 0's."""


def copied(nets: Nets) -> Nets:
    """Copies of the trained nets, which are not trained themselves."""
    return {name: _copy(net) for name, net in nets.items() if is_trained(net)}


def _copy(net: nn.Module) -> nn.Module:
    """A copy without gradients, on the same meshes. Buffers are cloned first: a trace's tensors have no storage to
    copy."""
    copies: dict[int, Any] = {id(buffer): buffer.detach().clone() for buffer in net.buffers()}
    for parameter in net.parameters():
        if isinstance(parameter, DTensor):
            copies[id(parameter.device_mesh)] = parameter.device_mesh
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return copy.deepcopy(net, copies).requires_grad_(False)
