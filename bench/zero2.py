"""A trace of one process as DeepSpeed's ZeRO-2 would have it on one of several ranks, for one net and its optimizer.

From DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, with its default settings:
- weights in one flat buffer, as many bytes as before; a float32 master copy of the rank's part, of float32 weights too;
- the optimizer's state, its temporaries and the averaged gradients of the rank's part alone;
- a flat buffer of ``reduce_bucket_size`` elements from the start of every backward to its end.

Left out: alignment of parts, the flat copy of the gradients at the step, NCCL's own buffers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace

REDUCE_BUCKET_ELEMENTS = 500_000_000


def zero2(trace: Trace, world: int, trained: int) -> Trace:
    """The trace of one of ``world`` ranks.

    Args:
        trained: elements of the parameters that the optimizer steps, float32.
    """
    part = trace.operator_part[trace.made_by]
    step = part == (trace.parts.index("optimizer") if "optimizer" in trace.parts else -1)
    kind = [CATEGORIES.index(name) for name in ("optimizer", "gradients")]
    nbytes = np.where(np.isin(trace.category, kind) | step, -(-trace.nbytes // world), trace.nbytes)
    master = len(nbytes)
    bucket = master + 1
    events = np.flatnonzero(trace.operator_part[trace.operator] == trace.parts.index("backward"))
    stops = np.flatnonzero(np.diff(events) > 1)
    begins = [int(events[0]), *(int(events[i + 1]) for i in stops)]
    ends = [*(int(events[i]) + 1 for i in stops), int(events[-1]) + 1]
    setup = next(end for name, _, end in trace.phases if name == "setup")
    added = [(setup, ALLOCATE, master)]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        added += [(begin, ALLOCATE, bucket + number), (end, FREE, bucket + number)]
    at = np.array([position for position, _, _ in added])
    count = len(begins)

    def moved(position: int) -> int:
        return position + int(np.searchsorted(at, position, side="left"))

    return dataclasses.replace(
        trace,
        kind=np.insert(trace.kind, at, [what for _, what, _ in added]),
        storage=np.insert(trace.storage, at, [storage for _, _, storage in added]),
        operator=np.insert(trace.operator, at, trace.operator[np.minimum(at, len(trace.operator) - 1)]),
        nbytes=np.concatenate([nbytes, [-(-4 * trained // world)], np.full(count, 4 * REDUCE_BUCKET_ELEMENTS)]),
        category=np.concatenate([trace.category, [kind[0]], np.full(count, CATEGORIES.index("communication"))]).astype(
            np.uint8
        ),
        stream=np.concatenate([trace.stream, np.zeros(1 + count, np.uint8)]),
        made_by=np.concatenate([trace.made_by, np.full(1 + count, 0, np.int32)]),
        phases=tuple((name, moved(start), moved(end)) for name, start, end in trace.phases),
    )
