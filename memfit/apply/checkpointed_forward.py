"""The state that a forward finds in its module, so that recomputing it finds the same state and leaves none behind.

Buffers that a forward writes (counters, the vectors of spectral norm, codebooks) have the values again with which the
first forward began, in copies; those of the module stay as they are. Batch normalisation reads none of its statistics
while it trains, so that a copy of their present values will do. Parameters ask for gradients, and modules train, as
they did: a GAN's generator looks through a discriminator at rest. Python's attributes and the containers among the
arguments, such as a cache of keys and values, have their old contents (``memfit.apply.mutable_state``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from memfit.apply.mutable_state import MutableState


class ForwardState:
    """The state of a module and of its arguments at the beginning of one forward."""

    def __init__(self, module: nn.Module, arguments: Any = ()) -> None:
        self._module, modules = module, list(module.modules())
        self._python = MutableState(arguments, modules)
        self._flags = _flags(module)
        self._statistics = [
            (part, name) for part in modules if _normalises(part) and part.training for name in part._buffers
        ]
        self._first: dict[tuple[nn.Module, str], tuple[Tensor, int, Tensor]] = {
            (part, name): (buffer, buffer._version, buffer.detach().clone())
            for part in modules
            if not _normalises(part)
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.is_inference()
        }

    @contextmanager
    def watched(self, forward: AbstractContextManager[Any]) -> Iterator[None]:
        """Around the forward: what it writes is remembered."""
        with forward:
            yield
        self._python.forward_ended()
        for (part, name), (buffer, version, _) in list(self._first.items()):
            if part._buffers.get(name) is buffer and buffer._version == version:
                del self._first[part, name]

    def again(self, recomputing: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Around each recomputing of the forward; there are several where a graph is gone back through twice."""
        return _Again(self, recomputing)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        copies = {key: value.clone() for key, (_, _, value) in self._first.items()}
        for part, name in self._statistics:
            buffer = part._buffers[name]
            if buffer is not None:
                copies[part, name] = buffer.detach().clone()
        now, flags = [(part, name, part._buffers.get(name)) for part, name in copies], _flags(self._module)
        _set_flags(self._module, self._flags)
        for (part, name), value in copies.items():
            part._buffers[name] = value
        try:
            with self._python.as_before():
                yield
        finally:
            for part, name, buffer in now:
                part._buffers[name] = buffer
            _set_flags(self._module, flags)


class _Again(AbstractContextManager[None]):
    """May be entered more than once, which a generator may not."""

    def __init__(self, forward: ForwardState, recomputing: AbstractContextManager[Any]) -> None:
        self._forward, self._recomputing, self._open = forward, recomputing, ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._forward._as_then())
        self._open.enter_context(self._recomputing)

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def _normalises(module: nn.Module) -> bool:
    """Whether it keeps running statistics, which kernels write without telling autograd."""
    return "running_mean" in module._buffers


def _flags(module: nn.Module) -> tuple[list[bool], list[bool]]:
    """What trains and what is learned, in order: an engine may put other parameters in the places of these."""
    return [part.training for part in module.modules()], [p.requires_grad for p in module.parameters()]


def _set_flags(module: nn.Module, flags: tuple[list[bool], list[bool]]) -> None:
    for part, trains in zip(module.modules(), flags[0], strict=True):
        if part.training != trains:
            part.training = trains
    for parameter, learns in zip(module.parameters(), flags[1], strict=True):
        if parameter.requires_grad != learns:
            parameter.requires_grad_(learns)
