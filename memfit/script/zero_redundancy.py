"""``ZeroRedundancyOptimizer.consolidate_state_dict`` on a fake group: the state that other ranks would send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from memfit.script.import_hooks import on_import
from memfit.torch_compat.zero_redundancy import (
    copy_to_host,
    device_of_states,
    groups_of_ranks,
    keep_states,
    prepare_consolidation,
)

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


@contextmanager
def consolidated_states() -> Iterator[None]:
    """Context in which consolidating takes the memory that it takes on this rank among real ones.

    A rank sends its state as bytes on its device; the rank that keeps all states receives each as bytes on its device,
    makes tensors of it there, and copies them to the host (torch's ``_broadcast_object``).
    """
    with on_import({_MODULE: _hook}):
        yield


def _hook(module: ModuleType) -> tuple[Any, dict[str, Any]]:
    def consolidate_state_dict(self: Any, to: int = 0) -> None:
        prepare_consolidation(self)
        own, device = self.optim.state_dict(), device_of_states(self)
        states: list[Any] = []
        keep_states(self, states)
        for rank, groups in enumerate(groups_of_ranks(self)):
            if self.rank == to:
                state = own if rank == self.rank else _received(own, groups, device)
                states.append(copy_to_host(module, state))
            elif rank == self.rank:
                torch.empty(_nbytes(own), dtype=torch.uint8, device=device)

    return module.ZeroRedundancyOptimizer, {"consolidate_state_dict": consolidate_state_dict}


def _received(own: dict[str, Any], groups: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """The state of another rank: this rank's kinds of state for the parameters that the other one has."""
    pattern: dict[str, Any] = next(iter(own["state"].values()), {})
    state: dict[int, dict[str, Any]] = {}
    options = []
    for mine, group in zip(own["param_groups"], groups, strict=True):
        numbers = range(len(state), len(state) + len(group["params"]))
        options.append({**mine, "params": list(numbers)})
        for number, parameter in zip(numbers, group["params"], strict=True):
            state[number] = {key: _like(value, parameter, device) for key, value in pattern.items()}
    received = torch.empty(sum(_nbytes(values) for values in state.values()), dtype=torch.uint8, device=device)
    del received
    return {"state": state if pattern else {}, "param_groups": options}


def _like(value: Any, parameter: nn.Parameter, device: torch.device) -> Any:
    """What the optimizer keeps of a parameter: a scalar as it is, else a tensor of the parameter's shape."""
    if not isinstance(value, Tensor):
        return value
    shape = parameter.shape if value.dim() else value.shape
    return torch.empty(shape, dtype=value.dtype, device=device)


def _nbytes(value: Any) -> int:
    """Bytes of the tensors in nested dicts."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value.values())) if isinstance(value, dict) else 0
