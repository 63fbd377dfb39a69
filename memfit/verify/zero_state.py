"""What ``verify`` reads and writes of ranks under ZeRO, whose optimizer holds flat parts and no parameter's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memfit.apply.train_state import TrainState, is_trained
from memfit.engine.zero import Zero
from memfit.engine.zero_full_state import named, put_optimizer, put_weights
from memfit.job import Nets


def whole_weights(nets: Nets, engine: Zero) -> dict[str, Tensor]:
    """The weights that are stepped, by ``net.path``."""
    found = {
        f"{name}.{path}": value
        for name, net in nets.items()
        if is_trained(net)
        for path, value in engine.weights(net).items()
    }
    return {name: found[name].clone() for name in named(engine)}


def put_zero_back(train_state: TrainState, engine: Zero, state: dict[str, Any]) -> None:
    """A state of one rank, put into nets and the optimizer."""
    weights = {f"{name}.{path}": value for name, net in state["nets"].items() for path, value in net.items()}
    for name, net in train_state.nets.items():
        for path, buffer in net.named_buffers():
            if f"{name}.{path}" in weights:
                buffer.copy_(weights[f"{name}.{path}"])
    put_weights(engine, weights)
    ((name, optimizer),) = train_state.optimizers.items()
    paths = {
        id(p): f"{net}.{path}" for net, module in train_state.nets.items() for path, p in module.named_parameters()
    }
    put_optimizer(engine, optimizer, state["optimizers"][name], [paths[id(p)] for p in train_state.stepped[name]])
