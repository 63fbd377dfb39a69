"""Turns a tracer's lists into the columns of a ``Trace``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from memfit.events import CATEGORIES, Trace
from memfit.trace.tracer import Tracer

OF_ONE_CARD: Mapping[str, Any] = MappingProxyType({"operator_card_call": None, "card_calls": ()})
"""Columns and tables of a trace that no other card shares."""


def as_trace(tracer: Tracer) -> Trace:
    """The tracer's lists as a Trace. What Python frees while it is made is not in it."""
    events = slice(0, len(tracer.kind))
    return Trace(
        **of_storages(tracer, range(len(tracer.nbytes))),
        **of_operators(tracer, 0),
        kind=np.array(tracer.kind[events], np.int8),
        storage=np.array(tracer.storage[events], np.int32),
        operator=np.array(tracer.operator[events], np.int32),
        modules=tuple(tracer.modules),
        phases=tuple(tracer.phases),
        is_workspace_configured=tracer.call_memory.is_workspace_configured,
        net_kind=tracer.kind_of_net(),
        assumed=tracer.virtual.assumptions.of_sizes(),
        tensor_parallel=tracer.tensor_parallel,
        fixed_validation=_fixed_validation(tracer),
    )


def _fixed_validation(tracer: Tracer) -> str:
    shape = tracer.validation_shape
    return tracer.changed_by_windows if shape is not None and not shape.was_read else ""


def of_storages(tracer: Tracer, storages: Iterable[int]) -> dict[str, Any]:
    """A Trace's columns of these storages; one that was never named is a temporary."""
    code = {name: index for index, name in enumerate(CATEGORIES)}
    some = list(storages)
    return {
        "nbytes": np.array([tracer.nbytes[i] for i in some], np.int64),
        "category": np.array([code[tracer.category[i] or "temporaries"] for i in some], np.uint8),
        "stream": np.array([tracer.stream[i] for i in some], np.uint8),
        "made_by": np.array([tracer.made_by[i] for i in some], np.int32),
    }


def of_operators(tracer: Tracer, first: int) -> dict[str, Any]:
    """A Trace's columns of the operators from ``first`` on, and their names."""
    names: dict[str, int] = {}
    parts: dict[str, int] = {}
    rows = tracer.op_rows[first:] or [("", 0, "setup", 0, 0)]
    described, calls = tracer.call_memory.card_calls, {"": 0}
    card_call = np.zeros(len(rows), np.int32)
    for row, call in described.items():
        if row >= first:
            card_call[row - first] = calls.setdefault(str(call), len(calls))
    return {
        "operator_name": np.array([names.setdefault(row[0], len(names)) for row in rows], np.int32),
        "operator_module": np.array([row[1] for row in rows], np.int32),
        "operator_part": np.array([parts.setdefault(row[2], len(parts)) for row in rows], np.int32),
        "operator_flops": np.array([row[3] for row in rows], np.int64),
        "operator_bytes": np.array([row[4] for row in rows], np.int64),
        "operator_card_call": card_call,
        "card_calls": tuple(calls),
        "names": tuple(names),
        "parts": tuple(parts),
    }
