"""Whether optimizers have the state that they keep: before their first step they have none."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.apply.train_state import TrainState


def has_optimizer_state(train_state: TrainState) -> bool:
    """Whether every optimizer that keeps state has it."""
    return all(optimizer.state or not keeps_state(optimizer) for optimizer in train_state.optimizers.values())


def keeps_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step leaves state, as SGD without momentum does not; True where that cannot be tried.

    It is tried on a copy with the same groups, each of one small parameter.
    """
    try:
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        trial.param_groups = [_with_small_parameter(group) for group in optimizer.param_groups]
        trial.step()
    except Exception:  # an optimizer that cannot be copied so, or not stepped here
        return True
    return bool(trial.state)


def _with_small_parameter(group: Mapping[str, Any]) -> dict[str, Any]:
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    return {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}), "params": [parameter]}
