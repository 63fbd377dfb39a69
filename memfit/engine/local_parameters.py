"""Modules that compute with this rank's part of their own parameters, which are DTensors for everything else.

Optimizers, norms and checkpoints see DTensors; the module's forward sees plain tensors, so that it may call operators
for which DTensor has no sharding rule, such as group normalisation, and change its buffers. Of parameters that are
whole on every rank, the forwards of the modules around it see plain tensors too: a layer may read the weight of a
module in it without a call (the convolution of a state-space layer, tied weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from memfit.engine.own_gradients import with_own_gradient
from memfit.nested_tensors import tensors_in
from memfit.replaced_methods import replaced_method
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import gives_parts, summed


class LocalParameters:
    """In the forward of a module, its own DTensor parameters are local tensors, and DTensors after it.

    Gradients come back as DTensors of the parameter's own placements.

    Args:
        read: what the forward has of a parameter's local tensor; autograd goes through it.
    """

    def __init__(self, read: Callable[[Tensor], Tensor] = lambda local: local) -> None:
        self._read = read

    def watch(self, module: nn.Module) -> None:
        """Wraps the forward itself: hooks, as FSDP2's, run outside of it, and a forward that is recomputed without
        them has local tensors too."""
        inner = module.forward
        method = getattr(inner, "__func__", None)  # a copy of the module is then given to it, and not this one

        def forward(its: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._in_forward(its, (args, kwargs)):
                return inner(*args, **kwargs) if method is None else method(its, *args, **kwargs)

        module.forward = replaced_method(module, inner, forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalParameters:
        return self

    def exchange(self, module: nn.Module) -> Callable[[], None]:
        """Gives a module local tensors; returns what gives its DTensors back."""
        own: dict[str, Any] = own_parameters(module)
        held = {key: value for key, value in own.items() if isinstance(value, DTensor)}
        for key, parameter in held.items():
            own[key] = self._read(with_own_gradient(parameter.to_local()))
        return lambda: own.update(held)

    @contextmanager
    def _in_forward(self, module: nn.Module, inputs: Any) -> Iterator[None]:
        """The module with local tensors. A recomputed forward ends with an error as soon as it has what was asked."""
        give_back = self.exchange(module)
        try:
            yield
        finally:
            give_back()


class WholeParameters(LocalParameters):
    """The same for every module in a module that has a ``_Reader``, and for itself, while no forward around it runs.

    Modules that FSDP2 shards by themselves have their parameters in their own forward alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._local: set[int] = set()
        """Modules whose parameters are local tensors now."""

    @contextmanager
    def _in_forward(self, module: nn.Module, inputs: Any) -> Iterator[None]:
        inside = [] if id(module) in self._local else list(_gathered_together(module))
        readers = [(each, vars(each)[_READER]) for each in inside if _READER in vars(each)]
        self._local.update(map(id, inside))
        given: list[Callable[[], None]] = []
        try:
            given += [reader.exchange(each) for each, reader in readers]
            if _READER in vars(module):
                given.append(vars(module)[_READER].look_at(module, inputs))
            yield
        finally:
            for give_back in reversed(given):
                give_back()
            self._local.difference_update(map(id, inside))


class _Reader(LocalParameters):
    """How the forward of a module has its own parameters, which are whole on every rank.

    Where the module sees this rank's part of an activation, as an activation function between two layers that are cut,
    its gradients are summed over the ranks. That shows in its first forward with gradients: its input comes from a
    DTensor of which every rank has a part.

    Args:
        mesh: of one dimension.
        of_parts: whether the module sees parts; None: its first forward tells.
    """

    def __init__(self, mesh: DeviceMesh, of_parts: bool | None) -> None:
        super().__init__(lambda local: _SummedGradient.apply(local, mesh) if self._of_parts else local)
        self._mesh, self._of_parts = mesh, of_parts
        self._sums = False
        """Whether gradients of what the module has now are summed."""

    def exchange(self, module: nn.Module) -> Callable[[], None]:
        """As of ``LocalParameters``."""
        self._sums = bool(self._of_parts)
        return super().exchange(module)

    def look_at(self, module: nn.Module, inputs: Any) -> Callable[[], None]:
        """Notes from the inputs of a module, whose parameters are local tensors now, whether it sees parts; returns
        what takes the sums off that it then has."""
        known = [tensor.grad_fn for tensor in tensors_in(inputs) if tensor.grad_fn is not None]
        if self._of_parts is None and known:
            self._of_parts = any(_is_part(node, self._mesh) for node in known)
        if self._sums or not self._of_parts:
            return lambda: None
        own: dict[str, Any] = own_parameters(module)
        held = {key: value for key, value in own.items() if value is not None}
        own.update({key: self._read(value) for key, value in held.items()})
        return lambda: own.update(held)


def _is_part(node: Any, mesh: DeviceMesh) -> bool:
    """Whether what an autograd node gives comes from DTensors of which every rank of a mesh has a part, or whose
    gradient each rank has a part of."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        parts = gives_parts(node, mesh)
        if parts:
            return True
        before = [each for each, _ in node.next_functions if each is not None and each not in seen]
        if parts is None:
            seen.update(before)
            waiting += before
    return False


_READER = "memfit_reader"
"""The attribute of a module whose own parameters are whole: how its forward has them."""


def _gathered_together(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those in it whose parameters FSDP2 does not gather by themselves."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _gathered_together(child)


class _SummedGradient(torch.autograd.Function):
    """Gives a tensor back; its gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        context.mesh = mesh
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        return summed(gradients[0].contiguous(), context.mesh), None


def replicate_parameters(net: nn.Module, mesh: DeviceMesh, of_parts: frozenset[nn.Module] = frozenset()) -> None:
    """Every parameter that is whole as a replicated DTensor; one that modules share stays shared.

    Args:
        of_parts: modules that see this rank's heads or tokens alone, as far as that is known before a forward.
    """
    whole: dict[int, nn.Parameter] = {}
    parameters = WholeParameters()
    for module in net.modules():
        own = own_parameters(module)
        names = [key for key, value in own.items() if value is not None and not isinstance(value, DTensor)]
        for key in names:
            parameter = own[key]
            assert parameter is not None
            if id(parameter) not in whole:
                replicated = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
                whole[id(parameter)] = nn.Parameter(replicated, requires_grad=parameter.requires_grad)
            module.register_parameter(key, whole[id(parameter)])
        if names:
            vars(module)[_READER] = _Reader(mesh, True if module in of_parts else None)
    for module in list(net.modules()):
        if any(_READER in vars(each) for each in module.modules()):
            parameters.watch(module)
