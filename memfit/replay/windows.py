"""The events of a window of any micro-batches, put together from traces of windows of one or two equal ones.

Parts of a traced window: its first micro-batch, the second (where it has one), and what follows them (clip, optimizer,
zero_grad). A window of N micro-batches is the first's part, N - 1 second parts of the others' shapes, and the first's
end. What a second part frees of another, or leaves to another (sums of losses, of 512 bytes), is freed at its own end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.events import ALLOCATE, FREE, Trace


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Where a traced window's parts lie: event numbers."""

    start: int
    second: int
    """Of the second micro-batch; equal to ``end_of_micro`` where there is none."""
    end_of_micro: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Allocations and frees in order, by local storage numbers, and each storage's bytes."""

    kind: np.ndarray
    storage: np.ndarray
    nbytes: np.ndarray
    carried_in: np.ndarray
    """Storages that the window frees and that an earlier one allocated, in order."""
    carried_out: np.ndarray
    """Storages that it leaves to the next one, in order: as many as it frees, or none."""


def parts_of(trace: Trace) -> Parts:
    """The parts of the trace's last window."""
    start, end = [(start, end) for name, start, end in trace.phases if name == "train"][-1]
    names = np.array(trace.parts)[trace.operator_part[trace.operator[start:end]]]
    micro = np.isin(names, ("fetch", "forward", "backward"))
    over = int(np.flatnonzero(micro)[-1]) + 1 if micro.any() else 0
    backward = np.flatnonzero(names == "backward")
    again = np.flatnonzero(np.isin(names[:over], ("fetch", "forward")))
    again = again[again > backward[0]] if len(backward) else again[:0]
    second = int(again[0]) if len(again) else over
    return Parts(start=start, second=start + second, end_of_micro=start + over, end=end)


def window_events(traces: list[Trace]) -> Events:
    """A window of micro-batches, one trace for each, at its shape."""
    first, parts = traces[0], parts_of(traces[0])
    if len(traces) == 1 and parts.second == parts.end_of_micro:
        return _events([(first, parts.start, parts.end, False)])
    pieces = [(first, parts.start, parts.second, False)]
    for trace in traces[1:]:
        of = parts_of(trace)
        pieces.append((trace, of.second, of.end_of_micro, True))
    pieces.append((first, parts.end_of_micro, parts.end, False))
    return _events(pieces)


def _events(pieces: list[tuple[Trace, int, int, bool]]) -> Events:
    """Pieces put one behind the other; those that stand alone share no storage with the rest."""
    shared = max(len(trace.nbytes) for trace, _, _, alone in pieces if not alone)
    kinds, storages, sizes, base = [], [], [next(t for t, _, _, alone in pieces if not alone).nbytes], shared
    for trace, start, end, alone in pieces:
        kind, storage = trace.kind[start:end], trace.storage[start:end].astype(np.int64)
        kind, storage = kind[storage >= 0], storage[storage >= 0]
        if alone:
            kind, storage = _closed(kind, storage)
            storage = storage + base
            base += len(trace.nbytes)
            sizes.append(trace.nbytes)
        kinds.append(kind)
        storages.append(storage)
    kind, storage = np.concatenate(kinds), np.concatenate(storages)
    born, freed = storage[kind == ALLOCATE], storage[kind == FREE]
    carried_in, carried_out = freed[~np.isin(freed, born)], born[~np.isin(born, freed)]
    if len(carried_in) != len(carried_out):
        keep = (kind == ALLOCATE) | ~np.isin(storage, carried_in)
        kind = np.concatenate([kind[keep], np.full(len(carried_out), FREE, kind.dtype)])
        storage = np.concatenate([storage[keep], carried_out])
        carried_in = carried_out = np.zeros(0, np.int64)
    return Events(
        kind=kind, storage=storage, nbytes=np.concatenate(sizes), carried_in=carried_in, carried_out=carried_out
    )


def _closed(kind: np.ndarray, storage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without frees of others' storages; its own that are left are freed at the end."""
    born = storage[kind == ALLOCATE]
    keep = np.isin(storage, born)
    left = born[~np.isin(born, storage[kind == FREE])]
    return np.concatenate([kind[keep], np.full(len(left), FREE, kind.dtype)]), np.concatenate([storage[keep], left])
