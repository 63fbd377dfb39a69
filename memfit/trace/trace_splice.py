"""A trace without what happened between two of its events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.events import ALLOCATE, FREE, Trace

Phase = tuple[str, int, int]


def without_events(trace: Trace, first: int, last: int, phases: tuple[Phase, ...]) -> Trace | None:
    """The trace without its events from ``first`` to ``last`` (past the end); None where they left storages behind.

    What they freed of earlier storages is freed at ``first`` instead. Storages and operators keep their numbers.

    Args:
        phases: those that stay, none of them in between.
    """
    kind, storage = trace.kind[first:last], trace.storage[first:last]
    made, freed = storage[kind == ALLOCATE], storage[kind == FREE]
    if np.setdiff1d(made, freed).size:
        return None
    earlier = freed[~np.isin(freed, made)]
    shift = first + len(earlier) - last

    def moved(position: int) -> int:
        return position if position <= first else first if position == last else position + shift

    def spliced(column: np.ndarray, between: np.ndarray) -> np.ndarray:
        return np.concatenate([column[:first], between.astype(column.dtype), column[last:]])

    return replace(
        trace,
        kind=spliced(trace.kind, np.full(len(earlier), FREE)),
        storage=spliced(trace.storage, earlier),
        operator=spliced(trace.operator, np.full(len(earlier), trace.operator[last - 1])),
        phases=tuple((name, moved(start), moved(end)) for name, start, end in phases),
    )
