"""A job's state under engines that leave it in the parameters and in torch's optimizers, whole or as DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.engine.collectives import full_tensor, local_shard
from memfit.engine.refusals import DTENSOR_STEP
from memfit.job import Nets, is_trained


class TorchStateMixin:
    """Reads and writes the state by torch's own interfaces."""

    def categorised(self, nets: Nets) -> Iterator[tuple[Tensor, str]]:
        """Nothing but parameters and their gradients is held."""
        yield from ()

    def accumulated(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The parameters."""
        return list(parameters)

    def stepped_parameters(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
        """The parameters of the optimizer's groups."""
        return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}

    def full_gradients(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Gathers gradients where they are sharded. A parameter without a gradient is left out."""
        return {name: full_tensor(p.grad).clone() for name, p in parameters.items() if p.grad is not None}

    def full_weights(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Gathers weights where they are sharded."""
        return {name: full_tensor(parameter).clone() for name, parameter in parameters.items()}

    def put_weights(self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Each rank writes its shard."""
        for name, parameter in parameters.items():
            if name in weights:
                parameter.data.copy_(local_shard(weights[name], parameter.data))

    def put_state(
        self,
        nets: Nets,
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any],
        stepped: Mapping[str, Sequence[nn.Parameter]],
    ) -> None:
        """Each rank keeps its shard; what it is given is changed."""
        for name, net in nets.items():
            here = net.state_dict()
            net.load_state_dict({key: local_shard(value, here[key]) for key, value in state["nets"][name].items()})
        for name, optimizer in optimizers.items():
            whole = state["optimizers"][name]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if whole["state"] and not optimizer.state and getattr(type(optimizer), DTENSOR_STEP, False):
                self.state_of_parts(nets, {name: optimizer})  # makes the state that says how values are sharded
            for index, own in whole["state"].items():
                held = optimizer.state.get(parameters[index], {})
                for key, value in own.items():
                    like = next(
                        (known for known in (held.get(key), parameters[index]) if _has_shape(known, value)), None
                    )
                    if like is not None:
                        own[key] = local_shard(value, like)
            optimizer.load_state_dict(whole)

    def state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """torch's own, which makes an optimizer's missing state by a step that changes nothing."""
        from torch.distributed.checkpoint import state_dict

        model = _trained(nets)
        return {
            "nets": state_dict.get_model_state_dict(model),
            "optimizers": {
                name: state_dict.get_optimizer_state_dict(model, optimizer) for name, optimizer in optimizers.items()
            },
        }

    def load_state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer], state: Mapping[str, Any]) -> None:
        """torch's own."""
        from torch.distributed.checkpoint import state_dict

        model, same_names = _trained(nets), state_dict.StateDictOptions(strict=True)
        state_dict.set_model_state_dict(model, state["nets"], options=same_names)
        for name, optimizer in optimizers.items():
            options = state_dict.StateDictOptions(strict=_keeps_state_of_each(optimizer))
            state_dict.set_optimizer_state_dict(model, optimizer, state["optimizers"][name], options=options)

    def net_of_parts(self, net: nn.Module) -> dict[str, Any]:
        """torch's own."""
        from torch.distributed.checkpoint import state_dict

        return dict(state_dict.get_model_state_dict(net))

    def load_net_of_parts(self, net: nn.Module, state: Mapping[str, Any]) -> None:
        """torch's own."""
        from torch.distributed.checkpoint import state_dict

        options = state_dict.StateDictOptions(strict=True)
        state_dict.set_model_state_dict(net, dict(state), options=options)


def _has_shape(known: Any, value: Any) -> bool:
    return isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape == value.shape


def _keeps_state_of_each(optimizer: Optimizer) -> bool:
    """Whether every trained parameter has state; ScaledAdam keeps that of several with the first of them."""
    return all(p in optimizer.state for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


def _trained(nets: Nets) -> nn.ModuleDict:
    return nn.ModuleDict({name: net for name, net in nets.items() if is_trained(net)})
