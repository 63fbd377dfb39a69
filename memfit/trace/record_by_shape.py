"""A record of several shapes, cut into the first shape's trace and the sizes of the same storages at every shape."""

from __future__ import annotations

import numpy as np

from memfit.events import ALLOCATE, FREE, Trace
from memfit.trace.columns import as_trace
from memfit.trace.trace_family import events_before, storages_in, varying
from memfit.trace.tracer import Tracer


def split_by_shape(
    tracer: Tracer, phases: list[tuple[str, int, int]], shapes: int
) -> tuple[Trace, list[np.ndarray | None] | None, np.ndarray]:
    """The first shape's trace, and the sizes of the same storages at every shape (None: its events differ)."""
    full = as_trace(tracer)
    end = phases[-1][2]
    first = events_before(full, end, tuple(phases))
    windows = [varying(tracer.marks, start, stop) for name, start, stop in phases if name == "train"]
    validation = [
        part for name, start, stop in phases if name == "validate" for part in varying(tracer.marks, start, stop)
    ]
    base, structure = storages_in(full, windows[-1] + validation)
    earlier, same_as_first = storages_in(full, windows[0] + validation, without=_kept_from_now_on(full))
    others = tracer.phases[len(phases) :]
    each = len(others) // max(shapes - 1, 1)
    sizes: list[np.ndarray | None] = [full.nbytes[base]]
    for i in range(shapes - 1):
        own = others[i * each : (i + 1) * each]
        parts = [part for _, start, stop in own for part in varying(tracer.marks, start, stop)]
        made, parts_structure = storages_in(full, parts if each == 2 else parts + validation)
        sizes.append(full.nbytes[made] if np.array_equal(parts_structure, structure) else None)
    if not np.array_equal(same_as_first, structure):
        return first, None, base
    twice = [None if row is None else np.concatenate([row, row]) for row in sizes]
    return first, twice, np.concatenate([base, earlier])


def _kept_from_now_on(trace: Trace) -> np.ndarray:
    """Storages that are never freed: state that the first window makes, such as a gradient scaler's scale."""
    return np.setdiff1d(trace.storage[trace.kind == ALLOCATE], trace.storage[trace.kind == FREE])
