"""What ranks under ZeRO hold together, as whole tensors by ``net.path``, and whole tensors put back into their parts.

Every rank calls each of these, at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.engine.collectives import gather
from memfit.engine.zero import Zero
from memfit.engine.zero_partition import Run, runs, whole


def runs_of(engine: Zero) -> list[Run]:
    """What this rank holds of the parameters that are stepped."""
    return runs(engine.divided.zero, engine.stage, engine.rank)


def named(engine: Zero) -> dict[str, nn.Parameter]:
    """The parameters that are stepped, of all ranks together, in the optimizer's order."""
    made = engine.divided
    return {made.zero.param_names[parameter]: parameter for parameter in made.parameters}


def whole_gradients(engine: Zero) -> dict[str, Tensor]:
    """The sums over ranks, once they are reduced and before the step; none of what no loss has used."""
    held = {run.name: (values, run.start) for run, values in _gradients(engine)}
    used = set[int]().union(*gather(engine, sorted(engine.divided.used)))
    found = {}
    for place, (name, parameter) in enumerate(named(engine).items()):
        if place in used:
            values, start = held.get(name, (torch.empty(0, device=parameter.device), 0))
            found[name] = whole(values, start, getattr(parameter, "ds_shape", parameter.shape), engine.group)
    return found


def _gradients(engine: Zero) -> list[tuple[Run, Tensor]]:
    """Each run that holds elements, and its part of the gradient."""
    zero, found = engine.divided.zero, []
    parts = {id(flat): number for number, flat in enumerate(engine.stepped(zero.optimizer))}
    places = dict.fromkeys(parts, 0)
    for run in runs_of(engine):
        if engine.choices.offload_optimizer:
            assert run.flat.grad is not None
            values = run.of(run.flat.grad)
        else:
            values = zero.averaged_gradients[parts[id(run.flat)]][places[id(run.flat)]].reshape(-1)[: run.count]
        places[id(run.flat)] += 1
        if run.count:
            found.append((run, values))
    return found


def put_weights(engine: Zero, weights: Mapping[str, Tensor]) -> None:
    """Writes whole weights to what this rank holds of them."""
    with torch.no_grad():
        for name, parameter in named(engine).items():
            if name in weights and hasattr(parameter, "ds_tensor"):
                part = parameter.ds_tensor.data
                own = weights[name].reshape(-1)[engine.rank * part.numel() :][: part.numel()]
                part[: own.numel()].copy_(own)
            elif name in weights:
                parameter.data.copy_(weights[name])
    weights_changed(engine)


def weights_changed(engine: Zero) -> None:
    """Somebody wrote to the nets' weights, or to this rank's parts of them: what DeepSpeed holds beside follows."""
    zero = engine.divided.zero
    with torch.no_grad():
        if engine.stage < 3:
            for run in runs_of(engine):
                run.of(run.flat).copy_(run.parameter.detach().reshape(-1)[run.start : run.start + run.count])
            return
        zero._partition_all_parameters()
        for flat, part in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
            flat.data.copy_(part.data)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def put_optimizer(engine: Zero, optimizer: Optimizer, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """A whole optimizer's ``state_dict``, put into the state of this rank's parts.

    Args:
        names: of its parameters, in order.
    """
    optimizer.state.clear()
    by_name = {name: state["state"].get(number, {}) for number, name in enumerate(names)}
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named(engine).items()}
    elementwise = {
        key
        for name, shape in shapes.items()
        for key, value in by_name[name].items()
        if shape and isinstance(value, Tensor) and tuple(value.shape) == shape
    }
    for run in runs_of(engine):
        for key, value in by_name[run.name].items():
            own = optimizer.state[run.flat]
            if key not in elementwise:
                own[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            if key not in own:
                own[key] = torch.zeros_like(run.flat)
            run.of(own[key]).copy_(value.reshape(-1)[run.start : run.start + run.count])
    for group, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in given.items() if key != "params"})
