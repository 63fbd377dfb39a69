"""Tensors in a nesting of mappings, lists, tuples and dataclasses, as batches are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def _is_plain(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether there is nothing but text and numbers, as of names of a batch's samples: there may be millions."""
    return bool(value) and type(value[0]) in _PLAIN and _PLAIN.issuperset(map(type, value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in a nesting of mappings, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        if not _is_plain(value):
            for item in value:
                yield from tensors_in(item)
    elif _is_record(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None) -> Any:
    """Returns the same nesting of mappings, lists, tuples and dataclasses with every tensor mapped.

    Args:
        other: maps the rest; a list or tuple of text and numbers alone is one thing.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change, other) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        made = copy.copy(value)
        made.update(changed)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change, other) for item in value))
    if isinstance(value, list | tuple) and not _is_plain(value):
        return type(value)(map_tensors(item, change, other) for item in value)
    if _is_record(value):
        record = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(record, field.name, map_tensors(getattr(value, field.name), change, other))
        return record
    return value if other is None else other(value)


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
