"""Restores Python state around a module's forward: attributes, lists, dicts and sets of its arguments and modules.

A cache of keys and values is such an argument: a block appends to it, and a second forward of the same block would
append again. ``MutableState`` remembers what a forward changed, restores it while the forward is repeated, and
afterwards leaves everything as it was before the repetition. It keeps only the old values of what changed, so no tensor
lives longer because of it. Not covered: attributes in ``__slots__``, globals, and objects that C code keeps.
"""

from __future__ import annotations

import enum
import operator
import types
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MOST = 5000
"""The largest number of containers that are searched; the rest is ignored."""
_ABSENT = object()
_CLOSED = (
    type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, enum.Enum, Tensor,
    torch.Generator, torch.dtype, torch.device, str, bytes, int, float, complex,
)  # fmt: skip
_OFTEN_CLOSED = frozenset({type(None), bool, int, float, str, torch.dtype})
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks, mode."""

Container = dict[Any, Any] | list[Any] | set[Any]


class MutableState:
    """The contents of the containers in some arguments and modules at the time of construction."""

    def __init__(self, arguments: Any, modules: list[nn.Module]) -> None:
        self._before = {id(box): (box, _copy(box)) for box in _containers(arguments, modules)}
        self._changes: list[tuple[Container, Any]] = []

    def forward_ended(self) -> None:
        """Keeps the old contents of the containers that changed, and releases the rest."""
        self._changes = [
            (box, change) for box, old in self._before.values() if (change := _change(box, old)) is not None
        ]
        self._before = {}

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Context in which the containers have their old contents."""
        now = [(box, _copy(box)) for box, _ in self._changes]
        for box, change in self._changes:
            _undo(box, change)
        try:
            yield
        finally:
            for box, contents in now:
                _put(box, contents)


def _containers(arguments: Any, modules: list[nn.Module]) -> Iterator[Container]:
    """Returns every dict, list and set that the arguments lead to, also through attributes of objects, and those of the
    modules.

    A module among the arguments is skipped. Of a module's attributes only plain containers are searched, not objects of
    other classes such as a configuration.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(arguments, True)]
    for module in modules:
        yield vars(module)
        stack += [
            (value, False)
            for name, value in vars(module).items()
            if name not in _OF_TORCH and type(value) not in _OFTEN_CLOSED
        ]
    while stack and len(seen) < MOST:
        value, through_objects = stack.pop()
        if isinstance(value, _CLOSED) or value is None or (key := id(value)) in seen:
            continue
        seen.add(key)
        inner: list[Any] = []
        if isinstance(value, dict | list | set):
            yield value
            inner += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple | frozenset):
            inner += value
        attributes = getattr(value, "__dict__", None) if through_objects else None
        if isinstance(attributes, dict) and attributes and not isinstance(value, nn.Module):
            yield attributes
            inner += attributes.values()
        stack += [(container, through_objects) for container in inner]


def _copy(box: Container) -> Any:
    return dict(box) if isinstance(box, dict) else list(box) if isinstance(box, list) else set(box)


def _change(box: Container, old: Any) -> Any:
    """Returns what has to be restored to have the old contents again; None if nothing changed."""
    if isinstance(box, dict):
        if _are_identical(box, old) and _are_identical(box.values(), old.values()):
            return None
        slots = {key: value for key, value in old.items() if box.get(key, _ABSENT) is not value}
        slots |= dict.fromkeys(box.keys() - old.keys(), _ABSENT)
        return slots or None
    if isinstance(box, list):
        if _begins_with(box, old):
            return None if len(box) == len(old) else len(old)
        return old
    return None if box == old else old


def _are_identical(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _begins_with(longer: list[Any], shorter: list[Any]) -> bool:
    return len(longer) >= len(shorter) and all(map(operator.is_, longer, shorter))


def _undo(box: Container, change: Any) -> None:
    if isinstance(box, dict):
        _put(box, {key: value for key, value in (dict(box) | change).items() if value is not _ABSENT})
    else:
        _put(box, box[:change] if isinstance(box, list) and isinstance(change, int) else change)


def _put(box: Container, contents: Any) -> None:
    """Gives a container these contents, and touches only what differs."""
    if isinstance(box, dict):
        kind = OrderedDict if isinstance(box, OrderedDict) else dict
        for key in [key for key in box if key not in contents]:
            kind.__delitem__(box, key)
        for key, value in contents.items():
            if box.get(key, _ABSENT) is not value:
                kind.__setitem__(box, key, value)
        if list(box) != list(contents):
            kind.clear(box)
            kind.update(box, contents)
    elif isinstance(box, list):
        box[:] = contents
    else:
        box.clear()
        box.update(contents)
