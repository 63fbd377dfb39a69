"""Snapshots of what forwards leave in attributes: a hidden state, a counter, a list, a generator of random numbers.

A net that carries its state from batch to batch, or a job that keeps a running centre, holds it in an attribute and not
in a buffer. Searched are the attributes of a job and of modules that are not torch's own, with the lists, dicts, sets
and deques in them. Tensors and arrays are copied up to ``MOST_BYTES`` together, while there is memory for it. Left as
they are: larger ones, those with a graph, containers of more than ``MOST_ENTRIES``, attributes of other objects and of
classes, and globals.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memfit.engine.collectives import is_memory_failure
from memfit.torch_compat.attributes import version_of

MOST_BYTES = 16 << 20
MOST_ENTRIES = 1000
_NONE: frozenset[str] = frozenset()
_uninspected: set[type] = {int, float, bool, str, bytes, type(None)}
"""Types of values that are put back as they are: no containers, generators or tensors. More come as they are met."""
LEFT = object()
"""In the place of a value that is not put back."""
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks, mode."""
GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    torch.Generator: (lambda source: source.get_state(), lambda source, state: source.set_state(state)),
    random.Random: (lambda source: source.getstate(), lambda source, state: source.setstate(state)),
    np.random.Generator: (
        lambda source: source.bit_generator.state,
        lambda source, state: setattr(source.bit_generator, "state", state),
    ),
    np.random.RandomState: (lambda source: source.get_state(), lambda source, state: source.set_state(state)),
}
"""How the state of each kind of generator is read, and put back."""
CONTAINERS = (dict, list, set, deque)


class AttributeSnapshot:
    """The attributes of a job and of modules. ``keep`` notes them, and ``restore`` puts them back, any number of
    times."""

    def __init__(self, modules: Sequence[nn.Module], job: object) -> None:
        self._owners = [(job, _NONE), *((module, OF_MODULES) for module in modules if has_own_code(module))]
        self._boxes: list[tuple[Any, Any, frozenset[str]]] = []
        """Containers, their contents, and keys that are no part of these."""
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        """Of tensors by their ids: the tensor, its version, and the copy."""
        self._arrays: list[tuple[Any, Any]] = []
        """NumPy's arrays of numbers, and copies of them."""
        self._generators: list[tuple[Any, Any]] = []

    def keep(self) -> None:
        """Notes the present attributes. A tensor that has not changed since the last time is not copied again."""
        before, self._copies, self._boxes, self._generators, self._arrays = self._copies, {}, [], [], []
        pending = []
        for owner, skipped in self._owners:
            box = vars(owner)
            contents = contents_of(box, skipped)
            self._boxes.append((box, contents, skipped))
            if not _uninspected.issuperset(map(type, contents.values())):
                pending.append(contents)
        if pending:
            self._search(pending, before)

    def _search(self, pending: list[Any], before: Mapping[int, tuple[Tensor, int, Tensor]]) -> None:
        """Notes what these contents hold, and what is in that.

        Args:
            before: the copies of the last time.
        """
        left, seen = MOST_BYTES, {id(box) for box, _, _ in self._boxes}
        while pending:
            contents = pending.pop()
            for key, value in list(_entries(contents)):
                kind = type(value)
                if kind in _uninspected:
                    continue
                if isinstance(value, CONTAINERS):
                    if len(value) <= MOST_ENTRIES and id(value) not in seen:
                        seen.add(id(value))
                        inner = contents_of(value, _NONE)
                        self._boxes.append((value, inner, _NONE))
                        pending.append(inner)
                elif kind in GENERATORS:
                    self._generators.append((value, GENERATORS[kind][0](value)))
                elif kind is np.ndarray:
                    if value.dtype.kind in "biufc" and value.nbytes <= left and value.flags.writeable:
                        with contextlib.suppress(MemoryError):
                            self._arrays.append((value, value.copy()))
                        left -= value.nbytes
                elif not isinstance(value, Tensor):
                    _uninspected.add(kind)
                elif id(value) not in self._copies:
                    if not _is_kept(value, left):
                        contents[key] = LEFT
                        continue
                    copied = _copy(value, before.get(id(value)))
                    if copied is None:
                        contents[key], left = LEFT, 0
                        continue
                    left -= value.nbytes
                    self._copies[id(value)] = copied

    def restore(self) -> None:
        """Puts back what ``keep`` noted."""
        for box, contents, skipped in self._boxes:
            put_contents(box, contents, skipped)
        for tensor, _, copied in self._copies.values():
            tensor.data.copy_(copied)
        for array, copied in self._arrays:
            array[...] = copied
        for source, state in self._generators:
            GENERATORS[type(source)][1](source, state)


def has_own_code(module: nn.Module) -> bool:
    """Whether a class of the module is not torch's own: torch's modules keep in buffers what changes."""
    return any(kind.__module__.partition(".")[0] not in ("torch", "builtins") for kind in type(module).__mro__)


def _copy(tensor: Tensor, before: tuple[Tensor, int, Tensor] | None) -> tuple[Tensor, int, Tensor] | None:
    """The tensor, its version and a copy of it: the last one where it has not changed; None where memory runs out."""
    version = version_of(tensor)
    if before is not None and before[0] is tensor and before[1] == version:
        return before
    try:
        return tensor, version, tensor.clone()
    except (MemoryError, RuntimeError) as error:
        if not is_memory_failure(error):
            raise
        return None


def _is_kept(tensor: Tensor, left: int) -> bool:
    """Whether a tensor is copied, with this many bytes left for copies."""
    return (
        type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad and tensor.nbytes <= left
    )


def contents_of(box: Any, skipped: frozenset[str]) -> Any:
    """The contents of a dict, a list, a set or a deque, as a dict, a list or a set.

    Args:
        skipped: keys that are no part of them.
    """
    if isinstance(box, dict):
        return {key: value for key, value in box.items() if key not in skipped} if skipped else dict(box)
    return set(box) if isinstance(box, set) else list(box)


def _entries(contents: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(contents, dict):
        yield from contents.items()
    elif isinstance(contents, list):
        yield from enumerate(contents)


def put_contents(box: Any, contents: Any, skipped: frozenset[str]) -> None:
    """Gives a container these contents; in the place of ``LEFT`` stays what is there."""
    if isinstance(box, dict):
        for key in [key for key in box if key not in contents and key not in skipped]:
            del box[key]
        for key, value in contents.items():
            if value is not LEFT and box.get(key, LEFT) is not value:
                box[key] = value
    elif isinstance(box, set):
        box.clear()
        box.update(contents)
    else:
        now = list(box)
        old = [now[i] if value is LEFT and i < len(now) else value for i, value in enumerate(contents)]
        box.clear()
        box.extend(value for value in old if value is not LEFT)
