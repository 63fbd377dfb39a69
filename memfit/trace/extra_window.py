"""A third window for a trace of two, where the first one is unlike those that follow.

While cuDNN searches plans (``cudnn.benchmark``) the cache is emptied again and again, so the blocks that the second
window finds are the first one's leftovers. Only the third finds what every later one will.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from memfit.events import ALLOCATE, EMPTY_CACHE, FREE, Trace


def with_third_window(trace: Trace) -> Trace:
    """The trace with its second training window once more behind it, where the first one emptied the cache.

    What the second window frees of the first one's storages, the third frees of the second's, in the order in which
    they were made. The trace stays as it is where these do not have the same bytes.
    """
    windows = [(start, end) for name, start, end in trace.phases if name == "train"]
    if len(windows) != 2 or not (trace.kind[slice(*windows[0])] == EMPTY_CACHE).any():
        return trace
    start, end = windows[1]
    kind, storage = trace.kind[start:end], trace.storage[start:end]
    made, freed = storage[kind == ALLOCATE], storage[kind == FREE]
    replaced = np.sort(freed[~np.isin(freed, made)])
    left = np.sort(made[~np.isin(made, freed)])
    if not np.array_equal(trace.nbytes[replaced], trace.nbytes[left]):
        return trace
    again = np.arange(len(trace.nbytes) + 1)
    again[-1] = -1  # stands for EMPTY_CACHE's storage -1
    again[made] = np.arange(len(made)) + len(trace.nbytes)
    behind = again[trace.storage[end:]]
    again[replaced] = left
    columns = {name: getattr(trace, name) for name in ("nbytes", "category", "stream", "made_by")}
    length = end - start

    def moved(name: str, first: int, stop: int) -> tuple[str, int, int]:
        return (name, first + length, stop + length) if first >= end else (name, first, stop)

    phases = [moved(*phase) for phase in trace.phases]
    phases.insert(trace.phases.index(("train", start, end)) + 1, ("train", end, end + length))
    grown: dict[str, Any] = {name: np.concatenate([column, column[made]]) for name, column in columns.items()}
    return dataclasses.replace(
        trace,
        kind=np.insert(trace.kind, end, kind),
        storage=np.concatenate([trace.storage[:end], again[storage], behind]).astype(np.int32),
        operator=np.insert(trace.operator, end, trace.operator[start:end]),
        phases=tuple(phases),
        operator_card_call=None,  # an operator has the events of two windows
        card_calls=(),
        **grown,
    )
