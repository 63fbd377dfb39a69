"""What an optimizer's step may change beside parameters, gradients and the state of these.

Numbers in its groups and attributes, lists and dicts there, tensors such as Lookahead's slow weights, and what the
hooks of its step change: an average of the weights, held by a module, an object or a dict that a hook refers to.
Searched are groups, attributes and the optimizers and objects in them; of hooks the variables that they close over, the
arguments of a ``partial`` and the object of a method. Not searched: globals.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.apply.attribute_snapshot import CONTAINERS, LEFT, MOST_ENTRIES, OF_MODULES, contents_of, put_contents
from memfit.torch_compat.attributes import step_hooks

OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])))
"""Attributes that every optimizer has: groups, state, defaults, hooks."""
MOST_OBJECTS = 1000
"""The largest number of objects that are searched."""
SMALL_BYTES = 64 << 10
"""A larger tensor of the state is not kept alive for the case that a failed step puts another in its place."""
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
_OPTIONS = _PLAIN | {tuple}
_TENSORS = frozenset((Tensor,))
_NOTHING: frozenset[str] = frozenset()


class StepAttributes:
    """The contents of groups, attributes and what hooks refer to, at the time of construction.

    Args:
        values: all that the optimizer keeps of its parameters (``state_values``).
    """

    def __init__(self, optimizer: Optimizer, values: Sequence[Any]) -> None:
        self.group_tensors: list[Tensor] = []
        """Tensors in groups, other than parameters, such as a learning rate."""
        self.further: list[Tensor] = []
        """Tensors in attributes, and those that hooks refer to."""
        self._optimizer = optimizer
        self._boxes: list[tuple[Any, Any, frozenset[str]]] = []
        """Containers, their contents, and keys that are no part of these."""
        self._cells: list[tuple[types.CellType, Any]] = []
        self._ids = _tensor_ids(values)
        pending: list[Any] = list(step_hooks(optimizer))
        for group in optimizer.param_groups:
            options = self._box(group, _PARAMS).values()
            if _OPTIONS.issuperset(map(type, options)):
                continue
            for value in options:
                if isinstance(value, Tensor):
                    self.group_tensors.append(value)
                elif isinstance(value, CONTAINERS):
                    pending.append(value)
        own = self._box(vars(optimizer), OF_OPTIMIZERS)
        if own:
            pending += own.values()
        if not _TENSORS.issuperset(map(type, values)):
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    contents = self._box(state, _NOTHING)
                    for key, value in state.items():
                        if isinstance(value, Tensor) and value.nbytes > SMALL_BYTES:
                            contents[key] = LEFT
                        elif isinstance(value, CONTAINERS):
                            pending.append(value)
        if pending:
            self._search(pending)

    def put_back(self) -> bool:
        """Gives all of it its contents. Whether the state holds the tensors that it held: a step that has replaced one
        cannot be repeated."""
        for box, contents, skipped in self._boxes:
            put_contents(box, contents, skipped)
        for cell, value in self._cells:
            cell.cell_contents = value
        return _tensor_ids(state_values(self._optimizer)) == self._ids

    def _box(self, box: Any, skipped: frozenset[str]) -> Any:
        contents = contents_of(box, skipped)
        self._boxes.append((box, contents, skipped))
        return contents

    def _search(self, pending: list[Any]) -> None:
        """Notes what these objects hold, and what is in that."""
        seen = {id(self._optimizer), id(self._optimizer.state)}
        tensors: dict[int, Tensor] = {}
        while pending and len(seen) < MOST_OBJECTS:
            value = pending.pop()
            if type(value) in _PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                tensors[id(value)] = value
            elif isinstance(value, CONTAINERS):
                if len(value) <= MOST_ENTRIES:
                    contents = self._box(value, _NOTHING)
                    pending += contents.values() if isinstance(contents, dict) else contents
            elif isinstance(value, nn.Module):
                tensors |= {id(tensor): tensor for tensor in (*value.parameters(), *value.buffers())}
                self._box(vars(value), OF_MODULES)
            else:
                pending += self._parts(value)
        self.further = list(tensors.values())

    def _parts(self, value: Any) -> Iterator[Any]:
        """What an object or a function refers to."""
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                try:
                    held = cell.cell_contents
                except ValueError:  # a variable that has no value yet
                    continue
                self._cells.append((cell, held))
                yield held
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, tuple):
            yield from value
        elif isinstance(value, Optimizer):
            for group in value.param_groups:
                yield from self._box(group, _NOTHING).values()
            yield from list(value.state.values())
            yield from self._box(vars(value), OF_OPTIMIZERS).values()
        elif _is_of_job(value):
            yield from self._box(vars(value), _NOTHING).values()


_PARAMS = frozenset(("params",))


def _is_of_job(value: Any) -> bool:
    """Whether an object's class is the job's own or another library's: what Python's and torch's hold is left alone."""
    package = type(value).__module__.partition(".")[0]
    own = not isinstance(value, type | types.ModuleType) and isinstance(getattr(value, "__dict__", None), dict)
    return own and package not in ("torch", "memfit", "builtins") and package not in sys.stdlib_module_names


def state_values(optimizer: Optimizer) -> list[Any]:
    """All that an optimizer keeps of its parameters."""
    states = optimizer.state.values()
    if _DICTS.issuperset(map(type, states)):
        return [value for state in states for value in state.values()]
    return [value for state in states for value in (state.values() if type(state) is dict else (state,))]


_DICTS = frozenset((dict,))


def _tensor_ids(values: Sequence[Any]) -> list[int]:
    """Ids of the tensors that are not kept alive."""
    if _TENSORS.issuperset(map(type, values)):
        return list(map(id, values))
    return [id(value) for value in values if isinstance(value, Tensor) and value.nbytes > SMALL_BYTES]
