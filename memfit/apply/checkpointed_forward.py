"""Restores the state of a module before its forward is recomputed, so that both forwards compute the same.

Buffers that a forward writes (counters, the vectors of spectral norm, codebooks) get copies of the values with which
the first forward began; the module's own buffers stay as they are. Batch normalisation reads none of its statistics
while it trains, so a copy of their present values is enough. Parameters have the ``requires_grad`` and modules the mode
of the first forward: a GAN's generator looks through a discriminator that is frozen. Python attributes, and containers
among the arguments such as a cache of keys and values, have their earlier contents (``memfit.apply.mutable_state``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from memfit.apply.mutable_state import MutableState
from memfit.torch_compat.attributes import each_module, own_buffers, own_parameters, version_of


class ForwardState:
    """The state of a module and of its arguments at the beginning of a forward."""

    def __init__(self, module: nn.Module, arguments: Any = ()) -> None:
        self._modules = modules = list(each_module(module))
        self._python = MutableState(arguments, modules)
        self._flags = _flags(modules)
        self._statistics = [
            (part, name) for part in modules if _normalises(part) and part.training for name in own_buffers(part)
        ]
        self._first: dict[tuple[nn.Module, str], tuple[Tensor, int, Tensor]] = {
            (part, name): (buffer, version_of(buffer), buffer.detach().clone())
            for part in modules
            if not _normalises(part)
            for name, buffer in own_buffers(part).items()
            if buffer is not None and not buffer.is_inference()
        }

    @contextmanager
    def watched(self, forward: AbstractContextManager[Any]) -> Iterator[None]:
        """Context of the forward: remembers what the forward writes."""
        with forward:
            yield
        self._python.forward_ended()
        for (part, name), (buffer, version, _) in list(self._first.items()):
            if own_buffers(part).get(name) is buffer and version_of(buffer) == version:
                del self._first[part, name]

    def again(self, recomputing: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Context of each recomputation of the forward. There are several if a graph is traversed twice."""
        return _ReentrantContext(self, recomputing)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        copies = {key: value.clone() for key, (_, _, value) in self._first.items()}
        for part, name in self._statistics:
            buffer = own_buffers(part)[name]
            if buffer is not None:
                copies[part, name] = buffer.detach().clone()
        now, flags = [(part, name, own_buffers(part).get(name)) for part, name in copies], _flags(self._modules)
        _set_flags(self._modules, self._flags)
        for (part, name), value in copies.items():
            own_buffers(part)[name] = value
        try:
            with self._python.as_before():
                yield
        finally:
            for part, name, buffer in now:
                own_buffers(part)[name] = buffer
            _set_flags(self._modules, flags)


class _ReentrantContext(AbstractContextManager[None]):
    """A context manager that can be entered more than once; one made from a generator cannot."""

    def __init__(self, forward: ForwardState, recomputing: AbstractContextManager[Any]) -> None:
        self._forward, self._recomputing, self._open = forward, recomputing, ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._forward._as_then())
        self._open.enter_context(self._recomputing)

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def _normalises(module: nn.Module) -> bool:
    """Whether a module keeps running statistics, which kernels write without telling autograd."""
    return "running_mean" in own_buffers(module)


def _flags(modules: list[nn.Module]) -> tuple[list[bool], list[bool]]:
    """The training mode of every module and ``requires_grad`` of every parameter, in order: an engine may replace
    parameters.
    """
    return [part.training for part in modules], [p.requires_grad for p in _parameters(modules)]


def _parameters(modules: list[nn.Module]) -> Iterator[nn.Parameter]:
    return (value for part in modules for value in own_parameters(part).values() if value is not None)


def _set_flags(modules: list[nn.Module], flags: tuple[list[bool], list[bool]]) -> None:
    for part, trains in zip(modules, flags[0], strict=True):
        if part.training != trains:
            part.training = trains
    for parameter, learns in zip(_parameters(modules), flags[1], strict=True):
        if parameter.requires_grad != learns:
            parameter.requires_grad_(learns)
