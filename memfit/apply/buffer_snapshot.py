"""Snapshots of the state that a forward changes besides gradients: running statistics, averages, modes.

Buffers of modules in training mode are copied from the start, and so is what modules give by ``get_extra_state``. Any
other tensor, such as a momentum encoder's parameter, is copied from the first window in which it changed. A change to a
tensor without a copy is detected by autograd's version counter and raises ``CannotRepeatError``. Not detected: writes
through ``.data`` into the same memory, and writes to parameters that DeepSpeed gathers and drops. Given the job, what
forwards leave in attributes is put back too (``attribute_snapshot``).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memfit.apply.attribute_snapshot import AttributeSnapshot
from memfit.job import Job, Nets
from memfit.torch_compat.attributes import own_buffers, own_parameters, version_of


class CannotRepeatError(RuntimeError):
    """A forward changed tensors that have no earlier copy, so the forward cannot be repeated.

    Args:
        names: of the tensors, as ``net.path.name``; the first is said.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"the forward changed {names[0]}, which has no earlier copy")
        self.names = tuple(names)


class BufferSnapshot:
    """The state of nets that forwards change. ``keep`` copies it, and ``restore`` puts it back, any number of times.

    Args:
        job: whose attributes, and those of the nets' modules, are kept too; None: no attributes.
        changing: names of tensors that are known to change, which are copied from the start.
    """

    def __init__(self, nets: Nets, job: Job | None = None, changing: Collection[str] = ()) -> None:
        self._modules = [module for net in nets.values() for module in net.modules()]
        self._names = {
            id(module): f"{name}.{path}".rstrip(".")
            for name, net in nets.items()
            for path, module in net.named_modules()
        }
        self._seen_to_change: set[tuple[int, str]] = set()
        self._kept: dict[tuple[int, str], tuple[Tensor | None, Tensor | None]] = {}
        self._copied: list[_Place] = []
        """Places that are copied by each ``keep``."""
        self._watched: list[_Place] = []
        self._marks: tuple[list[int], list[int]] = ([], [])
        """Of what the watched places held."""
        self._has_learned = False
        """Whether more is to be copied than before."""
        self._is_plain = False
        """Whether none of what is watched is gathered and dropped by DeepSpeed."""
        self._with_extra = [m for m in self._modules if type(m).get_extra_state is not nn.Module.get_extra_state]
        self._extra: list[Any] = []
        """The extra state of these modules."""
        self._modes: list[bool] = []
        self._learns: list[bool] = []
        self._parameters = list({id(p): p for net in nets.values() for p in net.parameters()}.values())
        self._holders = [holder for module in self._modules for holder in (own_buffers(module), own_parameters(module))]
        self._places: list[_Place] = []
        if changing:
            named = ((self._names[id(module)], key) for module, _, _, key, _ in _places(self._modules))
            self._seen_to_change.update(key for path, key in named if f"{path}.{key[1]}" in changing)
        self._attributes = None if job is None else AttributeSnapshot(self._modules, job)

    def keep(self) -> None:
        """Remembers the present state. A tensor that never changes costs nothing; every other tensor is copied once."""
        modes = [module.training for module in self._modules]
        if modes != self._modes or len(self._places) != sum(map(len, self._holders)) or self._has_learned:
            self._sort_places()
        held = self._held()
        if type(None) in map(type, held):
            self._sort_places()
            held = self._held()
        before, self._kept = self._kept, {}
        for _, holder, name, key, is_buffer in self._copied:
            tensor = holder.get(name)
            if tensor is not None:
                copied = before.get(key, (None, None))[1]
                if copied is None or copied.shape != tensor.shape or copied.dtype != tensor.dtype:
                    copied = torch.empty_like(tensor, requires_grad=False)
                with torch.no_grad():
                    self._kept[key] = (tensor, copied.copy_(tensor))
            elif is_buffer:
                self._kept[key] = (None, None)
        self._marks = _marks(held, plain=self._is_plain)
        if self._attributes is not None:
            self._attributes.keep()
        self._extra = [copy.deepcopy(module.get_extra_state()) for module in self._with_extra]
        self._modes = modes
        self._learns = [parameter.requires_grad for parameter in self._parameters]

    def _sort_places(self) -> None:
        """Sorts what the modules hold into what is copied and what is watched."""
        self._places, self._copied, self._watched = list(_places(self._modules)), [], []
        for place in self._places:
            module, holder, name, key, is_buffer = place
            copies = holder[name] is None or key in self._seen_to_change or (is_buffer and module.training)
            (self._copied if copies else self._watched).append(place)
        self._has_learned = False
        self._is_plain = not any(hasattr(tensor, GATHERED) for tensor in self._held())

    def _held(self) -> list[Any]:
        """What the watched places hold now."""
        return [holder.get(name) for _, holder, name, _, _ in self._watched]

    def watch(self) -> None:
        """Takes the present value of every tensor without a copy as the one to keep."""
        self._marks = _marks(self._held(), plain=self._is_plain)

    def learn(self) -> None:
        """Ends a window: tensors that it changed and that had no copy are copied from now on."""
        changes = self._changes()
        if changes:
            self._seen_to_change |= {key for _, key in changes}
            self._has_learned = True

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
                    old, copied = self._kept[key]
                    if is_buffer:
                        holder[name] = old
                    if old is not None and copied is not None:
                        old.data.copy_(copied)
        if self._attributes is not None:
            self._attributes.restore()
        for module, extra in zip(self._with_extra, self._extra, strict=True):
            module.set_extra_state(copy.deepcopy(extra))
        changed = self.changed() if checked else []
        if changed:
            raise CannotRepeatError(changed)

    def changed(self) -> list[str]:
        """Names, as ``net.path.name``, of the tensors that changed since ``keep`` and have no copy."""
        return [f"{self._names[id(module)]}.{key[1]}" for module, key in self._changes()]

    def _changes(self) -> list[tuple[nn.Module, tuple[int, str]]]:
        """The watched tensors that have changed."""
        held = self._held()
        marks = _marks(held, plain=self._is_plain)
        if marks == self._marks:
            return []
        changed = zip(self._watched, held, zip(*marks, strict=True), zip(*self._marks, strict=True), strict=True)
        return [(place[0], place[3]) for place, now, mark, before in changed if now is not None and mark != before]


_Place = tuple[nn.Module, dict[str, Any], str, tuple[int, str], bool]
"""A module, what holds its buffers or parameters, a name in that, its key, and whether it is a buffer."""


def _places(modules: list[nn.Module]) -> Iterator[_Place]:
    for module in modules:
        for is_buffer, holder in ((True, own_buffers(module)), (False, own_parameters(module))):
            for name in list(holder):
                yield module, holder, name, (id(module), name), is_buffer


_PLAIN = frozenset((Tensor, nn.Parameter))
GATHERED = "ds_tensor"
"""What DeepSpeed keeps at a parameter that it gathers and drops."""


def _marks(tensors: Sequence[Any], *, plain: bool) -> tuple[list[int], list[int]]:
    """Versions and addresses, which change where a tensor is written to or replaced.

    Args:
        plain: False where some of them may be gathered and dropped, which have no mark.
    """
    if plain and _PLAIN.issuperset(map(type, tensors)):
        return list(map(version_of, tensors)), list(map(Tensor.data_ptr, tensors))
    pairs = [(0, 0) if tensor is None or hasattr(tensor, GATHERED) else _mark(tensor) for tensor in tensors]
    return [version for version, _ in pairs], [address for _, address in pairs]


def _mark(tensor: Any) -> tuple[int, int]:
    return version_of(tensor), tensor.data_ptr() if type(tensor) in _PLAIN else 0
