"""Whether a trace that was read from a file is one: every index in its range, every field of its type."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, EMPTY_CACHE, FREE, Trace
from memfit.settings import is_of_kind

_EVENTS = ("kind", "storage", "operator")
_STORAGES = ("nbytes", "category", "stream", "made_by")
_OPERATORS = ("operator_name", "operator_module", "operator_part", "operator_flops", "operator_bytes")


def check_trace(trace: Trace) -> None:
    """Raises ValueError where the columns of a trace do not belong together."""
    for names in (_EVENTS, _STORAGES, _OPERATORS):
        columns = [getattr(trace, name) for name in names]
        if any(column.ndim != 1 or column.dtype.kind not in "iu" for column in columns):
            raise ValueError("a column is not of whole numbers")
        if len({len(column) for column in columns}) != 1:
            raise ValueError("columns are not of one length")
    operators, storages = len(trace.operator_name), len(trace.nbytes)
    _check_range("operator", trace.operator, operators)
    _check_range("made_by", trace.made_by, operators)
    _check_range("category", trace.category, len(CATEGORIES))
    _check_range("operator_name", trace.operator_name, len(trace.names))
    _check_range("operator_module", trace.operator_module, len(trace.modules))
    _check_range("operator_part", trace.operator_part, len(trace.parts))
    if not np.isin(trace.kind, (ALLOCATE, FREE, EMPTY_CACHE)).all():
        raise ValueError("an event is of no kind")
    changes = np.isin(trace.kind, (ALLOCATE, FREE))
    _check_range("storage", trace.storage[changes], storages)
    if (trace.nbytes < 0).any() or float(trace.nbytes.sum(dtype=float)) > 2**60:
        raise ValueError("sizes that no memory has")
    if not all(isinstance(text, str) for table in (trace.names, trace.modules, trace.parts) for text in table):
        raise ValueError("a name is no text")
    _check_lives(trace, changes)
    at = 0
    for name, start, end in trace.phases:
        if not isinstance(name, str) or not at <= start <= end <= len(trace.kind):
            raise ValueError("phases are not in order")
        at = end


def check_fields(value: Any) -> None:
    """Raises ValueError where a field of a dataclass, or of those in it, has not the type of its annotation, or holds a
    number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if isinstance(value, Mapping):
        for entry in value.values():
            check_fields(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            check_fields(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, Trace | type):
        kinds = typing.get_type_hints(type(value))
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            if not is_of_kind(held, kinds[field.name]):
                raise ValueError(f"{field.name} is no {kinds[field.name]}")
            if isinstance(held, Mapping) and not all(_is_entry(entry, kinds[field.name]) for entry in held.items()):
                raise ValueError(f"{field.name} holds something else than {kinds[field.name]}")
            check_fields(held)


def _is_entry(entry: tuple[Any, Any], kind: Any) -> bool:
    options = typing.get_args(kind)
    return len(options) != 2 or all(is_of_kind(*pair) for pair in zip(entry, options, strict=True))


def _check_range(name: str, column: np.ndarray, count: int) -> None:
    if len(column) and (int(column.min()) < 0 or int(column.max()) >= count):
        raise ValueError(f"{name} is out of its range")


def _check_lives(trace: Trace, changes: np.ndarray) -> None:
    """A storage is allocated once, and freed at most once, after that."""
    order = trace.storage[changes]
    allocated = trace.kind[changes] == ALLOCATE
    first = np.full(len(trace.nbytes), -1)
    births, deaths = order[allocated], order[~allocated]
    if len(np.unique(births)) != len(births) or len(np.unique(deaths)) != len(deaths):
        raise ValueError("a storage is allocated or freed twice")
    first[births] = np.flatnonzero(allocated)
    if len(deaths) and ((first[deaths] < 0) | (first[deaths] > np.flatnonzero(~allocated))).any():
        raise ValueError("a storage is freed that is not there")
