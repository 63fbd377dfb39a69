"""Room for validation and saving: gradients freed first, optimizers' state moved aside, and everything put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memfit.apply.rig import Rig, map_tensors
from memfit.job import Job
from memfit.plan import PhasePolicy


@contextmanager
def room(rig: Rig, policy: PhasePolicy) -> Iterator[None]:
    """Inside, there is the room that a plan's policy makes for a phase, on a card."""
    if policy.gradients == "free":
        for net in rig.nets.values():
            for parameter in net.parameters():
                parameter.grad = None
    if policy.optimizer != "aside":
        yield
        return
    home = rig.device
    _move_state(rig, torch.device("cpu"))
    try:
        yield
    finally:
        _move_state(rig, home)


def with_settings(job: Job, settings: Mapping[str, Any]) -> Job:
    """The same job with a few other settings."""
    return type(job)(**{**job.settings(), **settings}) if settings else job


def _move_state(rig: Rig, device: torch.device) -> None:
    for optimizer in rig.optimizers.values():
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = map_tensors(
                state, lambda tensor: tensor.to(device) if tensor.numel() > 1 else tensor
            )
