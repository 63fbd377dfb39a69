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
    """Event numbers at which the parts of a traced window begin and end."""

    start: int
    second: int
    """The start of the second micro-batch; equal to ``end_of_micro`` where there is none."""
    end_of_micro: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowLayout:
    """A window's allocations and frees in order, by local storage numbers, whatever their bytes."""

    kind: np.ndarray
    storage: np.ndarray
    trace: np.ndarray
    """For each storage, the micro-batch whose trace it is in."""
    number: np.ndarray
    """For each storage, its number in that trace."""
    carried_in: np.ndarray
    """Storages that the window frees and that an earlier one allocated, in order."""
    carried_out: np.ndarray
    """Storages that it leaves to the next one, in order: as many as it frees, or none."""

    def nbytes(self, traces: list[Trace]) -> np.ndarray:
        """int64 (storages,): the storages' bytes at the traces' shapes."""
        if len(traces) == 1:
            return traces[0].nbytes[self.number]
        sizes = np.zeros(len(self.number), np.int64)
        for index, trace in enumerate(traces):
            mine = self.trace == index
            sizes[mine] = trace.nbytes[self.number[mine]]
        return sizes


def window_parts(trace: Trace) -> Parts:
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


def window_layout(traces: list[Trace]) -> WindowLayout:
    """A window of micro-batches, one trace for each."""
    parts = window_parts(traces[0])
    if len(traces) == 1 and parts.second == parts.end_of_micro:
        return _joined([(0, traces[0], parts.start, parts.end)])
    pieces = [(0, traces[0], parts.start, parts.second)]
    for index, trace in enumerate(traces[1:], 1):
        of = window_parts(trace)
        if of.second == of.end_of_micro:
            raise ValueError("a window of several micro-batches needs traces of windows of two")
        pieces.append((index, trace, of.second, of.end_of_micro))
    pieces.append((0, traces[0], parts.end_of_micro, parts.end))
    return _joined(pieces)


def _joined(pieces: list[tuple[int, Trace, int, int]]) -> WindowLayout:
    """Pieces put one behind the other; those of the first trace share its storages, the others stand alone."""
    kinds, storages = [], []
    for index, trace, start, end in pieces:
        kind, storage = trace.kind[start:end], trace.storage[start:end].astype(np.int64)
        kind, storage = kind[storage >= 0], storage[storage >= 0]
        if index:
            kind, storage = _closed(kind, storage)
        kinds.append(kind)
        storages.append(storage + (index << 32))
    kind, storage = np.concatenate(kinds), np.concatenate(storages)
    kind, storage, carried_in, carried_out = _balanced(kind, storage, pieces[0][1])
    used, local = np.unique(storage, return_inverse=True)
    return WindowLayout(
        kind=kind,
        storage=local.reshape(-1),
        trace=used >> 32,
        number=used & 0xFFFF_FFFF,
        carried_in=np.searchsorted(used, carried_in),
        carried_out=np.searchsorted(used, carried_out),
    )


def _balanced(
    kind: np.ndarray, storage: np.ndarray, trace: Trace
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(events, storages, carried in, carried out), where as many are carried in as out.

    What a part that was left out has allocated is not freed; what it has freed, is freed at the end.
    """
    parts = window_parts(trace)
    inside = slice(parts.start, parts.end)
    of_window, numbers = trace.kind[inside], trace.storage[inside]
    born, freed = storage[kind == ALLOCATE], storage[kind == FREE]
    foreign = freed[~np.isin(freed, born) & np.isin(freed, numbers[of_window == ALLOCATE])]
    left = born[~np.isin(born, freed) & np.isin(born, numbers[of_window == FREE])]
    keep = ~np.isin(storage, foreign)
    kind, storage = np.concatenate([kind[keep], np.full(len(left), FREE, kind.dtype)]), np.append(storage[keep], left)
    born, freed = storage[kind == ALLOCATE], storage[kind == FREE]
    carried_in, carried_out = freed[~np.isin(freed, born)], born[~np.isin(born, freed)]
    if len(carried_in) == len(carried_out):
        return kind, storage, carried_in, carried_out
    keep = ~np.isin(storage, carried_in)
    kind = np.concatenate([kind[keep], np.full(len(carried_out), FREE, kind.dtype)])
    return kind, np.append(storage[keep], carried_out), storage[:0], storage[:0]


def _closed(kind: np.ndarray, storage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without frees of others' storages; its own that are left are freed at the end."""
    born = storage[kind == ALLOCATE]
    keep = np.isin(storage, born)
    left = born[~np.isin(born, storage[kind == FREE])]
    return np.concatenate([kind[keep], np.full(len(left), FREE, kind.dtype)]), np.concatenate([storage[keep], left])
