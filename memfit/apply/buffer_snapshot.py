"""Snapshots of the state that a forward changes besides gradients: running statistics, averages, modes.

Buffers of modules in training mode are copied from the start. Any other tensor, such as a momentum encoder's parameter,
is copied from the first window in which it changed. A change to a tensor without a copy is detected by autograd's
version counter and raises ``CannotRepeatError``. Not detected: writes through ``.data`` into the same memory, values
that are not tensors, and writes to parameters that DeepSpeed gathers and drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memfit.job import Nets
from memfit.torch_compat.attributes import own_buffers, own_parameters, version_of


class CannotRepeatError(RuntimeError):
    """A forward changed a tensor that has no earlier copy, so the forward cannot be repeated."""


class BufferSnapshot:
    """The state of nets that forwards change. ``keep`` copies it, and ``restore`` puts it back, any number of times."""

    def __init__(self, nets: Nets) -> None:
        self._modules = [module for net in nets.values() for module in net.modules()]
        self._names = {
            id(module): f"{name}.{path}".rstrip(".")
            for name, net in nets.items()
            for path, module in net.named_modules()
        }
        self._seen_to_change: set[tuple[int, str]] = set()
        self._kept: dict[tuple[int, str], tuple[Tensor | None, Tensor | None]] = {}
        self._watched: dict[tuple[int, str], tuple[int, int]] = {}
        self._modes: list[bool] = []
        self._learns: list[bool] = []
        self._parameters = list({id(p): p for net in nets.values() for p in net.parameters()}.values())
        self._holders = [holder for module in self._modules for holder in (own_buffers(module), own_parameters(module))]
        self._places: list[_Place] = []

    def keep(self) -> None:
        """Remembers the present state. A tensor that never changes costs nothing; every other tensor is copied once."""
        before, self._kept, self._watched = self._kept, {}, {}
        if len(self._places) != sum(map(len, self._holders)):
            self._places = list(_places(self._modules))
        for module, holder, name, key, is_buffer in self._places:
            tensor = holder.get(name)
            if tensor is None:
                if is_buffer:
                    self._kept[key] = (None, None)
            elif key in self._seen_to_change or (is_buffer and module.training):
                copy = before.get(key, (None, None))[1]
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty_like(tensor, requires_grad=False)
                with torch.no_grad():
                    self._kept[key] = (tensor, copy.copy_(tensor))
            else:
                self._watched[key] = _mark(tensor)
        self._modes = [module.training for module in self._modules]
        self._learns = [parameter.requires_grad for parameter in self._parameters]

    def watch(self) -> None:
        """Takes the present value of every tensor without a copy as the one to keep."""
        for _, holder, name, key, _ in self._places:
            if key in self._watched and (now := holder.get(name)) is not None:
                self._watched[key] = _mark(now)

    def learn(self) -> None:
        """Ends a window: tensors that it changed and that had no copy are copied from now on."""
        self._seen_to_change |= {key for _, key in self._changes()}

    def restore(self, *, checked: bool = True) -> None:
        """Puts back what ``keep`` remembered. Graphs that hold these tensors stay valid.

        Args:
            checked: False if the caller has already looked for changes without a copy, by ``changed``.

        Raises:
            CannotRepeatError: a tensor without a copy changed; the message names it.
        """
        for module, mode in zip(self._modules, self._modes, strict=True):
            module.training = mode
        for parameter, learns in zip(self._parameters, self._learns, strict=True):
            if parameter.requires_grad != learns:
                parameter.requires_grad_(learns)
        with torch.no_grad():
            for _, holder, name, key, is_buffer in _places(self._modules):
                if key in self._kept:
                    old, copy = self._kept[key]
                    if is_buffer:
                        holder[name] = old
                    if old is not None and copy is not None:
                        old.data.copy_(copy)
        changed = self.changed() if checked else []
        if changed:
            raise CannotRepeatError(f"the forward changed {changed[0]}, which has no earlier copy")

    def changed(self) -> list[str]:
        """Names, as ``net.path.name``, of the tensors that changed since ``keep`` and have no copy."""
        return [f"{self._names[id(module)]}.{key[1]}" for module, key in self._changes()]

    def _changes(self) -> list[tuple[nn.Module, tuple[int, str]]]:
        """The watched tensors that have changed."""
        return [
            (module, key)
            for module, holder, name, key, _ in self._places
            if key in self._watched and (now := holder.get(name)) is not None and self._watched[key] != _mark(now)
        ]


_Place = tuple[nn.Module, dict[str, Any], str, tuple[int, str], bool]
"""A module, what holds its buffers or parameters, a name in that, its key, and whether it is a buffer."""


def _places(modules: list[nn.Module]) -> Iterator[_Place]:
    for module in modules:
        for is_buffer, holder in ((True, own_buffers(module)), (False, own_parameters(module))):
            for name in list(holder):
                yield module, holder, name, (id(module), name), is_buffer


_PLAIN = frozenset((Tensor, nn.Parameter))


def _mark(tensor: Any) -> tuple[int, int]:
    if hasattr(tensor, "ds_tensor"):
        return 0, 0
    return version_of(tensor), tensor.data_ptr() if type(tensor) in _PLAIN else 0
