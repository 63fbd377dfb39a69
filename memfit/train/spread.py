"""A rig's state on any engine, written and read by every rank together (torch.distributed.checkpoint).

Each rank writes what it holds and reads what it will hold: a state that 3 sharded ranks wrote is read by 2, by whole
replicas or by one device. Names are the nets' own, never a position: optimizers' states go by ``net.path``.

Left out: random numbers, which belong to a rank; what ``Job.saved`` adds beside nets and optimizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from memfit.apply.rig import Rig, is_trained
from memfit.engine.mesh import DATA
from memfit.engine.zero import Zero
from memfit.errors import InputError, describe
from memfit.train.zero_spread import take_zero_state, zero_net, zero_state

_SAME_NAMES = StateDictOptions(strict=True)


def save_spread(rig: Rig, folder: str | Path) -> None:
    """Writes the state; every rank calls it, on a folder that all of them see."""
    with _alone():
        dcp.save(_state(rig), **_how(rig, folder))


def load_spread(rig: Rig, folder: str | Path) -> None:
    """Reads a state that any engine and any number of ranks wrote, into a rig of the same job; every rank calls it.

    Raises:
        InputError: it is the state of another job, or not whole.
    """
    state = _state(rig)
    _read(rig, state, folder)
    if isinstance(rig.engine, Zero):
        take_zero_state(rig, rig.engine, state)
    else:
        model = _trained(rig)
        set_model_state_dict(model, state["nets"], options=_SAME_NAMES)
        for name, optimizer in rig.optimizers.items():
            set_optimizer_state_dict(model, optimizer, state["optimizers"][name], options=_SAME_NAMES)
        for name, net in rig.ema.items():
            set_model_state_dict(net, state["ema"][name], options=_SAME_NAMES)
    for name, schedule in rig.schedules.items():
        schedule.load_state_dict(state["schedules"][name])
    if rig.scaler:
        rig.scaler.load_state_dict(state["scaler"])


def load_spread_nets(rig: Rig, folder: str | Path) -> None:
    """The nets, buffers and averages alone of such a state, into a rig of one device.

    Raises:
        InputError: it is the state of another job, or not whole.
    """
    model = _trained(rig)
    state = {"nets": get_model_state_dict(model), **_beside(rig)}
    _read(rig, state, folder)
    set_model_state_dict(model, state["nets"], options=_SAME_NAMES)
    for name, net in rig.ema.items():
        set_model_state_dict(net, state["ema"][name], options=_SAME_NAMES)


def _read(rig: Rig, state: dict[str, Any], folder: str | Path) -> None:
    try:
        with _alone():
            dcp.load(state, **_how(rig, folder))
    except (dcp.api.CheckpointException, RuntimeError, OSError, ValueError) as error:
        raise InputError(
            f"checkpoint {folder}", f"cannot be read into this job: {describe(error)}", "give a checkpoint of this job"
        ) from error


def _trained(rig: Rig) -> nn.ModuleDict:
    return nn.ModuleDict({name: net for name, net in rig.nets.items() if is_trained(net)})


def _state(rig: Rig) -> dict[str, Any]:
    """The state as tensors and parts of tensors; frozen nets have their buffers alone."""
    return {
        **(zero_state(rig, rig.engine) if isinstance(rig.engine, Zero) else _nets_and_optimizers(rig)),
        **_beside(rig),
        "schedules": {name: schedule.state_dict() for name, schedule in rig.schedules.items()},
        "scaler": rig.scaler.state_dict() if rig.scaler else {},
    }


def _beside(rig: Rig) -> dict[str, Any]:
    return {
        "buffers": {name: dict(net.named_buffers()) for name, net in rig.nets.items() if not is_trained(net)},
        "ema": {name: _average(rig, net) for name, net in rig.ema.items()},
    }


def _average(rig: Rig, net: nn.Module) -> dict[str, Any]:
    return zero_net(net, rig.engine) if isinstance(rig.engine, Zero) else get_model_state_dict(net)


def _nets_and_optimizers(rig: Rig) -> dict[str, Any]:
    model = _trained(rig)
    return {
        "nets": get_model_state_dict(model),
        "optimizers": {name: get_optimizer_state_dict(model, optimizer) for name, optimizer in rig.optimizers.items()},
    }


def _how(rig: Rig, folder: str | Path) -> dict[str, Any]:
    group = None if rig.engine.mesh is None else rig.engine.mesh.get_group(DATA)
    return {"checkpoint_id": folder, "process_group": group, "no_dist": group is None}


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's remark that there is one process, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
