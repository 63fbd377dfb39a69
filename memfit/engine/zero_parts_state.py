"""The training state under ZeRO, as torch.distributed.checkpoint writes and reads it: parts of named tensors.

A rank holds a run of a parameter's elements (``memfit.engine.zero_partition``), which is a few boxes of the full
tensor. Names, shapes and nesting are those that torch gives full and FSDP2's states, so that any engine reads what any
wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.engine.zero_full_state import ZeroFullState
from memfit.engine.zero_partition import Run
from memfit.job import Nets, is_trained

if TYPE_CHECKING:
    from memfit.engine.tensor_piece import Piece


class ZeroPartsState(ZeroFullState):
    """A rank of ZeRO: its state as parts of full tensors."""

    def state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """The tensors are this rank's own; every parameter's optimizer state is there, made where there was none."""
        ((name, optimizer),) = optimizers.items()
        runs = self.runs()
        _make_state(optimizer, runs)
        return {
            "nets": {
                f"{net_name}.{path}": value
                for net_name, net in nets.items()
                if is_trained(net)
                for path, value in self.net_of_parts(net).items()
            },
            "optimizers": {name: self._optimizer_state(optimizer, runs)},
        }

    def load_state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer], state: Mapping[str, Any]) -> None:
        """Takes over numbers, and what DeepSpeed holds twice."""
        ((name, optimizer),) = optimizers.items()
        given = state["optimizers"][name]
        for run in self.runs():
            for key, value in given["state"].get(run.name, {}).items():
                if not isinstance(value, Tensor):
                    optimizer.state[run.flat][key] = value
        for group, read in zip(optimizer.param_groups, given["param_groups"], strict=True):
            group.update({key: value for key, value in read.items() if key != "params"})
        self.weights_changed()

    def net_of_parts(self, net: nn.Module) -> dict[str, Any]:
        """A net's tensors: each in full, or this rank's piece of it. They are the net's own."""
        return {path: self._weight(value) for path, value in net.state_dict(keep_vars=True).items()}

    def load_net_of_parts(self, net: nn.Module, state: Mapping[str, Any]) -> None:
        """The net's own tensors were read into."""

    def _weight(self, value: Any) -> Tensor | Piece:
        """A tensor that every rank has in full, or this rank's piece of it (stage 3)."""
        if not hasattr(value, "ds_tensor"):
            held: Tensor = value.detach()
            return held
        from memfit.engine.tensor_piece import Piece

        part = value.ds_tensor.data
        start = min(self.rank * part.numel(), value.ds_numel)
        return Piece(part[: value.ds_numel - start], start, tuple(value.ds_shape))

    def _optimizer_state(self, optimizer: Optimizer, runs: list[Run]) -> dict[str, Any]:
        state = {
            run.name: {key: _value(value, run) for key, value in optimizer.state[run.flat].items()} for run in runs
        }
        numbered = list(zip(self.named(), self.divided.groups, strict=True))
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [name for name, own in numbered if own == number],
            }
            for number, group in enumerate(optimizer.param_groups)
        ]
        return {"state": state, "param_groups": groups}


def _value(value: Any, run: Run) -> Any:
    """A value of one parameter's optimizer state: a piece of a tensor as large as the flat part, or the number
    itself."""
    if isinstance(value, Tensor) and value.numel() == run.flat.numel() and value.dim():
        from memfit.engine.tensor_piece import Piece

        return Piece(run.of(value), run.start, run.shape)
    return value


def _make_state(optimizer: Optimizer, own: list[Run]) -> None:
    """A step that changes no weight makes an optimizer's state, as torch makes it (``_init_optim_state``)."""
    fresh = {id(run.flat): run for run in own if not optimizer.state.get(run.flat)}
    if not fresh:
        return
    kept = [(group["params"], group["lr"]) for group in optimizer.param_groups]
    gradients = [(run.flat, run.flat.grad) for run in fresh.values()]
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [run.flat for run in fresh.values() if run.group == number]
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
    for flat, _ in gradients:
        flat.grad = torch.zeros_like(flat)
    step: Callable[[], Any] = optimizer.step
    step()
    for flat, gradient in gradients:
        flat.grad = gradient
    for group, (parameters, rate) in zip(optimizer.param_groups, kept, strict=True):
        group["params"], group["lr"] = parameters, rate
