"""The whole training state as plain values and tensors, and put back: what a checkpoint keeps.

Nets with every buffer (of frozen nets the buffers alone), what forwards carry beside them, optimizers, schedules,
scaler, average, and random numbers of every kind. Nothing is copied. An engine that spreads a state over ranks replaces
``state_of`` and ``put_back``.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.apply.carried_state import put_carried
from memfit.apply.train_state import TrainState
from memfit.job import Job, is_trained
from memfit.torch_compat.attributes import has_load_hooks, own_buffers, transient_buffers_of, with_versions_of
from memfit.trace.step_phases import saved_by_job

Rebuild = Callable[[Any], Any]
"""Makes values and new tensors of what a checkpoint holds; see ``Checkpoint.value``."""


def state_of(train_state: TrainState) -> dict[str, Any]:
    """The state, whose tensors are the train state's own."""
    trained = {name: net for name, net in train_state.nets.items() if is_trained(net)}
    own = type(train_state.job).saved is Job.saved
    return {
        "nets": {name: dict(net.state_dict()) for name, net in trained.items()},
        "buffers": {name: _buffers(net, name in trained) for name, net in train_state.nets.items()},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in train_state.optimizers.items()},
        "schedules": {name: schedule.state_dict() for name, schedule in train_state.schedules.items()},
        "scaler": train_state.scaler.state_dict() if train_state.scaler else None,
        "carried": train_state.carried.changed() if train_state.carried else {},
        "ema": {name: dict(net.state_dict()) for name, net in train_state.ema.items()},
        "random": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if train_state.device.type == "cuda" else [],
        },
        "saved": {} if own else dict(saved_by_job(train_state)),
    }


def put_back(train_state: TrainState, coded: Mapping[str, Any], new: Rebuild, mapped: Rebuild) -> None:
    """Puts a checkpoint's state into a train state of the same job.

    Args:
        coded: the state as the checkpoint holds it.
        new: rebuilds a part with tensors of its own.
        mapped: rebuilds a part with tensors that are mapped from the file, to copy from.

    Raises:
        KeyError, RuntimeError, ValueError: it is the state of another job.
    """
    put_nets_back(train_state, coded, new, mapped)
    _check_names("optimizers", coded["optimizers"], train_state.optimizers)
    for name, optimizer in train_state.optimizers.items():
        _put_optimizer(optimizer, new(coded["optimizers"][name]))
    _check_names("schedules", coded["schedules"], train_state.schedules)
    for name, schedule in train_state.schedules.items():
        schedule.load_state_dict(new(coded["schedules"][name]))
    if train_state.scaler and coded["scaler"]:
        train_state.scaler.load_state_dict(new(coded["scaler"]))
    numbers = new(coded["random"])
    random.setstate(numbers["python"])
    np.random.set_state(numbers["numpy"])
    torch.set_rng_state(numbers["cpu"])
    if train_state.device.type == "cuda" and len(numbers["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(numbers["cuda"])


def put_nets_back(train_state: TrainState, coded: Mapping[str, Any], new: Rebuild, mapped: Rebuild) -> None:
    """The nets, their buffers, their average and what forwards carry alone."""
    trained = {name: net for name, net in train_state.nets.items() if is_trained(net)}
    averages = {"ema": train_state.ema} if train_state.engine.rank == 0 else {}
    for part, nets in {"nets": trained, **averages}.items():
        _check_names(part, coded[part], nets)
        for name, net in nets.items():
            _put_net(net, mapped(coded[part][name]))
    _check_names("buffers", coded["buffers"], train_state.nets)
    for name, net in train_state.nets.items():
        _put_buffers(net, new(coded["buffers"][name]))
    put_carried(train_state, new(coded.get("carried", {})))


def _check_names(part: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if set(saved) != set(here):
        raise ValueError(f"it has {part} {', '.join(saved) or 'none'}; the job has {', '.join(here) or 'none'}")


def _buffers(net: nn.Module, trained: bool) -> dict[str, Tensor]:
    """All buffers of a frozen net; of a trained one those that its state_dict leaves out."""
    kept = set(net.state_dict()) if trained else set()
    return {path: buffer for path, buffer in net.named_buffers() if path not in kept}


def _put_net(net: nn.Module, values: dict[str, Any]) -> None:
    net.load_state_dict(with_versions_of(collections.OrderedDict(values), net))


def _put_buffers(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        module = net.get_submodule(owner)
        present = own_buffers(module).get(name)
        if present is not None and present.shape == value.shape and present.dtype == value.dtype:
            present.copy_(value)
        else:
            module.register_buffer(name, value, persistent=name not in transient_buffers_of(module))


def _put_optimizer(optimizer: Optimizer, values: dict[str, Any]) -> None:
    """As ``load_state_dict`` does it, but each tensor with the dtype it was kept in.

    torch's own casts every state to its parameter's dtype, which changes states of 8 bits, or of 32 with weights of
    16. An optimizer that has its own way of loading is left to it.
    """
    hooks = has_load_hooks(optimizer)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict or hooks:
        optimizer.load_state_dict(values)
        return
    optimizer.load_state_dict({**values, "state": {}})
    numbers = itertools.chain.from_iterable(group["params"] for group in values["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    of_number = dict(zip(numbers, parameters, strict=True))
    for key, state in values["state"].items():
        optimizer.state[of_number.get(key, key)] = state
