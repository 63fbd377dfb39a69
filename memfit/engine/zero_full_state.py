"""What ranks under ZeRO hold together, as full tensors by ``net.path``, and full tensors put back into their parts.

Every rank calls each of these, at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from memfit.engine import deepspeed
from memfit.engine.collectives import gather
from memfit.engine.data_parallel_mixin import DataParallelMixin
from memfit.engine.process_group import DATA
from memfit.engine.zero_partition import Run, buffers, gather_full, runs, step_parts
from memfit.job import Nets


@dataclass(kw_only=True)
class Divided:
    """What DeepSpeed made of the job's optimizer."""

    zero: Any
    """DeepSpeed's optimizer."""
    parameters: tuple[nn.Parameter, ...]
    groups: tuple[int, ...]
    """The index of each parameter's group in the optimizer."""
    used: set[int] = field(default_factory=set)
    """Parameters that this window gave a gradient, by their place."""
    ever: set[int] = field(default_factory=set)
    """Parameters that any window has given a gradient, by their place."""


@dataclass(frozen=True, kw_only=True)
class ZeroFullState(DataParallelMixin):
    """A rank of ZeRO: what it holds, read and written as full tensors."""

    rank: int
    world: int
    mesh: DeviceMesh
    stage: int
    choices: deepspeed.Choices = field(default_factory=deepspeed.Choices)
    _made: list[Divided] = field(default_factory=list, repr=False, compare=False)

    def stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """This rank's flat parts of the weights."""
        zero = self.divided.zero
        return list(zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that share a window."""
        return self.mesh.get_group(DATA)

    @property
    def divided(self) -> Divided:
        """What DeepSpeed made of the job's optimizer; not before ``divide``."""
        return self._made[0]

    def runs(self) -> list[Run]:
        """What this rank holds of the parameters that are stepped."""
        return runs(self.divided.zero, self.stage, self.rank)

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters that are stepped, of all ranks together, in the optimizer's order."""
        made = self.divided
        return {made.zero.param_names[parameter]: parameter for parameter in made.parameters}

    def categorised(self, nets: Nets) -> Iterator[tuple[Tensor, str]]:
        """DeepSpeed's buffers and its copies of the weights."""
        return buffers(self.divided.zero, self.stage)

    def accumulated(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The parameters in stage 1, this rank's parts in stage 2; in stage 3 a buffer that is always there."""
        if self.stage == 1:
            return list(parameters)
        return self.stepped(self.divided.zero.optimizer) if self.stage == 2 else []

    @contextmanager
    def local_step(self, optimizer: Optimizer) -> Iterator[Callable[[], None]]:
        """Steps this rank's parts; nothing is gathered."""
        zero = self.divided.zero
        zero.averaged_gradients = {0: [part.grad for part in self.stepped(optimizer)]}
        yield partial(step_parts, zero, self.stage, optimizer)
        zero.averaged_gradients = {}

    def stepped_parameters(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
        """The parameters that DeepSpeed was given, by the names that it has."""
        return self.named()

    def full_gradients(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The sums over ranks; none of what no loss has used."""
        held = {run.name: (values, run.start) for run, values in self._run_gradients()}
        used = set[int]().union(*gather(self, sorted(self.divided.used)))
        gradients = {}
        for place, (name, parameter) in enumerate(self.named().items()):
            if place in used:
                values, start = held.get(name, (torch.empty(0, device=parameter.device), 0))
                shape = getattr(parameter, "ds_shape", parameter.shape)
                gradients[name] = gather_full(values, start, shape, self.group)
        return gradients

    def full_weights(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Gathers weights where they are cut."""
        return {name: self._full_value(parameter).clone() for name, parameter in parameters.items()}

    def put_weights(self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Writes full weights to what this rank holds of them."""
        with torch.no_grad():
            for name, parameter in self.named().items():
                if name in weights and hasattr(parameter, "ds_tensor"):
                    part = parameter.ds_tensor.data
                    own = weights[name].reshape(-1)[self.rank * part.numel() :][: part.numel()]
                    part[: own.numel()].copy_(own)
                elif name in weights:
                    parameter.data.copy_(weights[name])
        self.weights_changed()

    def put_state(
        self,
        nets: Nets,
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any],
        stepped: Mapping[str, Sequence[nn.Parameter]],
    ) -> None:
        """Each rank takes its parts; buffers are written in full."""
        weights = {f"{name}.{path}": value for name, net in state["nets"].items() for path, value in net.items()}
        for name, net in nets.items():
            for path, buffer in net.named_buffers():
                if f"{name}.{path}" in weights:
                    buffer.copy_(weights[f"{name}.{path}"])
        self.put_weights({}, weights)
        ((name, optimizer),) = optimizers.items()
        paths = {id(p): f"{net}.{path}" for net, module in nets.items() for path, p in module.named_parameters()}
        self._put_optimizer(optimizer, state["optimizers"][name], [paths[id(p)] for p in stepped[name]])

    def weights_changed(self) -> None:
        """Makes what DeepSpeed holds besides the weights follow them, where somebody wrote to them."""
        zero = self.divided.zero
        with torch.no_grad():
            if self.stage < 3:
                for run in self.runs():
                    run.of(run.flat).copy_(run.parameter.detach().reshape(-1)[run.start : run.start + run.count])
                return
            zero._partition_all_parameters()
            for flat, part in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
                flat.data.copy_(part.data)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _full_value(self, value: Any) -> Tensor:
        if not hasattr(value, "ds_tensor"):
            held: Tensor = value.detach()
            return held
        part = value.ds_tensor.data
        start = min(self.rank * part.numel(), value.ds_numel)
        return gather_full(part[: value.ds_numel - start], start, value.ds_shape, self.group)

    def _run_gradients(self) -> list[tuple[Run, Tensor]]:
        """Each run that holds elements, and its part of the gradient."""
        zero, gradients = self.divided.zero, []
        parts = {id(flat): number for number, flat in enumerate(self.stepped(zero.optimizer))}
        places = dict.fromkeys(parts, 0)
        for run in self.runs():
            if self.choices.offload_optimizer:
                assert run.flat.grad is not None
                values = run.of(run.flat.grad)
            else:
                values = zero.averaged_gradients[parts[id(run.flat)]][places[id(run.flat)]].reshape(-1)[: run.count]
            places[id(run.flat)] += 1
            if run.count:
                gradients.append((run, values))
        return gradients

    def _put_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Puts an optimizer's full ``state_dict`` into the state of this rank's parts.

        Args:
            names: of its parameters, in order.
        """
        optimizer.state.clear()
        by_name = {name: state["state"].get(number, {}) for number, name in enumerate(names)}
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.named().items()}
        elementwise = {
            key
            for name, shape in shapes.items()
            for key, value in by_name[name].items()
            if shape and isinstance(value, Tensor) and tuple(value.shape) == shape
        }
        for run in self.runs():
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
