"""Private methods of torch's ZeroRedundancyOptimizer, of which ``consolidate_state_dict`` is made."""

from __future__ import annotations

from typing import Any

import torch


def prepare_consolidation(optimizer: Any) -> None:
    """What ``consolidate_state_dict`` does before it sends: checks, and takes over what the user changed in groups."""
    optimizer._check_overlap_initialized()
    optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)


def groups_of_ranks(optimizer: Any) -> list[list[dict[str, Any]]]:
    """The parameter groups that each rank steps."""
    return list(optimizer._partition_parameters())


def device_of_states(optimizer: Any) -> torch.device:
    """Where an optimizer's parameters are, through which its states are sent."""
    device: torch.device = optimizer._default_device
    return device


def keep_states(optimizer: Any, states: list[Any]) -> None:
    """Gives the rank that consolidates the states of all ranks."""
    optimizer._all_state_dicts = states


def copy_to_host(module: Any, state: Any) -> Any:
    """A state whose tensors are copied to the host; ``module`` is that of ZeroRedundancyOptimizer."""
    return module._recursive_copy_to_device(state, non_blocking=True, device=torch.device("cpu"))
