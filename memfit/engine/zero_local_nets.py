"""ZeRO for the nets that ranks share, and plain steps for those that each rank trains by itself.

Projects that train a GAN under DeepSpeed often give it the generator alone; every rank then steps its own
discriminators (``Job.unsynchronised``). DeepSpeed sees neither their parameters nor the turns that train them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.engine.refusals import check_turns
from memfit.engine.zero import Zero
from memfit.errors import InputError
from memfit.job import Job, Nets, is_trained


@dataclass(frozen=True, kw_only=True)
class ZeroWithLocalNets(Zero):
    """The engine of DeepSpeed's ZeRO, for jobs with and without nets of each rank's own."""

    _local: dict[str, nn.Module] = field(default_factory=dict, repr=False, compare=False)
    """The nets that each rank trains by itself."""

    def place(self, job: Job, nets: Nets) -> Nets:
        """Gives every rank the parameters and buffers of rank 0.

        Raises:
            InputError: the ranks built different nets, or they cannot be trained so.
        """
        self._note_local_nets(job, nets)
        return super().place(job, nets)

    def averages(self, job: Job, nets: Nets) -> Nets:
        """Averages of the shared nets as ``Zero`` keeps them; of this rank's own nets copies on rank 0."""
        self._note_local_nets(job, nets)
        own = self._replicas.averages(job, self._local)
        return {**super().averages(job, self._shared_nets(nets)), **own}

    def check(self, job: Job, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """Raises InputError where DeepSpeed cannot carry the optimizers or turns of the shared nets."""
        check_turns(job, nets, optimizers, self.name)
        shared = self._shared(optimizers)
        turns = [turn for turn in job.turns(list(optimizers)) if shared.keys() & set(turn.optimizers)]
        self.check_stepped(self._shared_nets(nets), shared, turns)

    def divide(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> None:
        """DeepSpeed takes over the shared nets' optimizer."""
        super().divide(self._shared_nets(nets), self._shared(optimizers))

    @contextmanager
    def accumulating(self, nets: Nets, last: bool, shared: bool = True) -> Iterator[None]:
        """Tells DeepSpeed where a backward of the shared nets begins and ends.

        Raises:
            InputError: the backward of another turn reached them.
        """
        with super().accumulating(nets, last, shared):
            yield
        if not shared and self.divided.used:
            name = self.divided.zero.param_names[self.divided.parameters[min(self.divided.used)]]
            raise InputError(
                f"a turn that steps {' or '.join(self._local)} on --engine {self.name}",
                f"its backward reaches parameter {name}, whose gradients DeepSpeed would reduce",
                "detach what the shared nets give to it, or write --engine ddp",
            )

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's parts, or its own nets' gradients."""
        if self._are_local(parameters):
            return self._replicas.gradients(parameters)
        return super().gradients(parameters)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clips by the norm over all ranks, or by that of this rank's own nets."""
        if self._are_local(parameters):
            return self._replicas.clip(parameters, max_norm)
        return super().clip(parameters, max_norm)

    def step(self, optimizer: Optimizer) -> None:
        """Steps this rank's part, or its own nets."""
        if self._is_local(optimizer):
            self._replicas.step(optimizer)
        else:
            super().step(optimizer)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Lets go of the gradients that this optimizer steps by."""
        if self._is_local(optimizer):
            self._replicas.zero_grad(optimizer)
        else:
            super().zero_grad(optimizer)

    def stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """This rank's flat parts of the weights, or its own nets' parameters."""
        if self._is_local(optimizer):
            return self._replicas.stepped(optimizer)
        return super().stepped(optimizer)

    def accumulated(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What holds the gradients of earlier micro-batches."""
        own = self._local_ids()
        return super().accumulated([p for p in parameters if id(p) not in own]) + [
            p for p in parameters if id(p) in own
        ]

    @contextmanager
    def local_step(self, optimizer: Optimizer) -> Iterator[Callable[[], None]]:
        """Steps without collectives."""
        stepping = self._replicas.local_step if self._is_local(optimizer) else super().local_step
        with stepping(optimizer) as step:
            yield step

    def stepped_parameters(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
        """The parameters that DeepSpeed was given, or those of the optimizer's groups."""
        if self._is_local(optimizer):
            return self._replicas.stepped_parameters(optimizer, names)
        return super().stepped_parameters(optimizer, names)

    def full_gradients(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The sums over ranks, or the gradients of this rank's own nets."""
        if self._are_local(parameters.values()):
            return self._replicas.full_gradients(parameters)
        return super().full_gradients(parameters)

    def put_weights(self, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
        """Writes full weights to what this rank holds of them."""
        if self._are_local(parameters.values()):
            self._replicas.put_weights(parameters, weights)
        else:
            super().put_weights(parameters, weights)

    def put_state(
        self,
        nets: Nets,
        optimizers: Mapping[str, Optimizer],
        state: Mapping[str, Any],
        stepped: Mapping[str, Sequence[nn.Parameter]],
    ) -> None:
        """Each rank takes its parts, and its own nets in full."""
        super().put_state(self._shared_nets(nets), self._shared(optimizers), state, stepped)
        self._replicas.put_state(self._local, self._own(optimizers), state, stepped)

    def state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """The tensors are this rank's own; those of its own nets are full."""
        state = super().state_of_parts(nets, self._shared(optimizers))
        if self._local:
            state["optimizers"] |= self._replicas.state_of_parts(self._local, self._own(optimizers))["optimizers"]
        return state

    def load_state_of_parts(self, nets: Nets, optimizers: Mapping[str, Optimizer], state: Mapping[str, Any]) -> None:
        """Takes over what was read."""
        super().load_state_of_parts(nets, self._shared(optimizers), state)
        if self._local:
            own = {key: value for key, value in state["nets"].items() if key.split(".")[0] in self._local}
            self._replicas.load_state_of_parts(self._local, self._own(optimizers), {**state, "nets": own})

    def _note_local_nets(self, job: Job, nets: Nets) -> None:
        self._local.update({name: nets[name] for name in job.unsynchronised if name in nets and is_trained(nets[name])})

    def _shared_nets(self, nets: Nets) -> Nets:
        return {name: net for name, net in nets.items() if name not in self._local}

    def _shared(self, optimizers: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
        return {name: optimizer for name, optimizer in optimizers.items() if not self._is_local(optimizer)}

    def _own(self, optimizers: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
        return {name: optimizer for name, optimizer in optimizers.items() if self._is_local(optimizer)}

    def _is_local(self, optimizer: Optimizer) -> bool:
        return self._are_local(p for group in optimizer.param_groups for p in group["params"])

    def _are_local(self, parameters: Any) -> bool:
        own = self._local_ids()
        return bool(own) and any(id(p) in own for p in parameters)

    def _local_ids(self) -> set[int]:
        return {id(p) for net in self._local.values() for p in net.parameters()}
