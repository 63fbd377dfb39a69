"""The state of nets that are cut into stages: names over all stages, and tensors gathered from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from memfit.errors import InputError
from memfit.job import Job, Nets


@dataclass(frozen=True, kw_only=True)
class StageState:
    """What one rank knows of all stages.

    Attributes:
        groups: by optimizer, names of the parameters of each of its groups on one device.
        process_group: the ranks that hold the stages.
    """

    groups: Mapping[str, tuple[tuple[str, ...], ...]]
    process_group: dist.ProcessGroup

    @staticmethod
    def of(job: Job, nets: Nets, process_group: dist.ProcessGroup) -> StageState:
        """Of nets that are whole."""
        names = _names(nets)
        groups = {
            name: tuple(tuple(names.get(id(p), "") for p in group["params"]) for group in optimizer.param_groups)
            for name, optimizer in job.optimizers(nets).items()
        }
        return StageState(groups=groups, process_group=process_group)

    def check(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises InputError where an optimizer of the stage has other groups than on one device."""
        names = _names(nets)
        for name, optimizer in optimizers.items():
            own = [{names.get(id(p), "") for p in group["params"]} for group in optimizer.param_groups]
            whole = self.groups[name]
            if len(own) != len(whole) or not all(map(set.issubset, own, map(set, whole))):
                why = "its groups of parameters are others for a stage than for the whole net"
                raise InputError(f"optimizer {name!r} on pp", why, "make as many groups for a part of the net")

    def gathered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of all stages by name; every rank calls it. Of what several stages have, the first stage's."""
        group = self.process_group
        if dist.get_backend(group) == "fake":
            return dict(own)
        here = {name: (tuple(tensor.shape), tensor.dtype, tensor.device.type) for name, tensor in own.items()}
        kinds: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(kinds, here, group=group)
        made: dict[str, Tensor] = {}
        for stage, named in enumerate(kinds):
            for name, (shape, dtype, device) in named.items():
                if name in made:
                    continue
                mine = stage == dist.get_rank(group)
                made[name] = own[name].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(made[name], group=group, group_src=stage)
        return made

    def part(self, nets: Nets, optimizers: Mapping[str, Optimizer], state: Mapping[str, Any]) -> dict[str, Any]:
        """The state dicts of one device, cut to what this stage holds."""
        names = _names(nets)
        kept: dict[str, dict[str, Any]] = {"nets": {}, "optimizers": {}}
        for name, net in nets.items():
            here = net.state_dict()
            kept["nets"][name] = {key: value for key, value in state["nets"][name].items() if key in here}
        for name, optimizer in optimizers.items():
            number = {path: i for i, path in enumerate(path for group in self.groups[name] for path in group)}
            values, groups = state["optimizers"][name], []
            moved: dict[int, int] = {}
            for group, of_one in zip(optimizer.param_groups, state["optimizers"][name]["param_groups"], strict=True):
                begin = len(moved)
                moved |= {begin + i: number[names[id(p)]] for i, p in enumerate(group["params"])}
                groups.append({**of_one, "params": list(range(begin, len(moved)))})
            held = {i: values["state"][there] for i, there in moved.items() if there in values["state"]}
            kept["optimizers"][name] = {**values, "state": held, "param_groups": groups}
        return {**state, **kept}

    def with_whole_groups(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of parts whose optimizers name the parameters of all stages in their groups."""
        return self._with_groups(state, lambda name, i, group: list(self.groups[name][i]))

    def with_own_groups(self, nets: Nets, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of parts whose optimizers name the parameters of this stage alone."""
        own = set(_names(nets).values())
        return self._with_groups(state, lambda name, i, group: [path for path in group["params"] if path in own])

    @staticmethod
    def _with_groups(state: Mapping[str, Any], names: Any) -> dict[str, Any]:
        optimizers = {
            name: {
                **values,
                "param_groups": [
                    {**group, "params": names(name, i, group)} for i, group in enumerate(values["param_groups"])
                ],
            }
            for name, values in state["optimizers"].items()
        }
        return {**state, "optimizers": optimizers}


def _names(nets: Nets) -> dict[int, str]:
    """``net.path`` of each parameter, by its id."""
    return {id(p): f"{name}.{path}" for name, net in nets.items() for path, p in net.named_parameters()}
