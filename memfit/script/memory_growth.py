"""Memory that grows from step to step: a list of losses with their graphs, a store of samples, weights that get more.

A trace sees a few steps. What each of them leaves behind for good is small there, and fills the card in a long run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.script.outcome import NOWHERE, Line, MemoryGrowth

_LEAST_STEPS = 3
_LONG_RUN = 1_000_000
"""Steps: what does not fill the device within them is not told."""
_BLOCK = 512
"""Bytes: the allocator rounds each tensor up to them."""
_WEIGHTS = [CATEGORIES.index(name) for name in ("parameters", "optimizer")]
_KNOWN = [*_WEIGHTS, *(CATEGORIES.index(name) for name in ("gradients", "communication", "ema", "frozen", "workspace"))]
_LEAST_TIMES = 2
"""Times that weights get more: once, other layers begin to train."""
_REPLACED = 5
"""Times in a row that what a line holds is larger than before, where it grows by another size each time."""


def memory_growth(
    trace: Trace, ends: Sequence[int], row_lines: Sequence[Line], usable_bytes: int | None
) -> tuple[MemoryGrowth, ...]:
    """The lines that hold more after each step, those that add most first. What a line keeps for a few steps, as the
    last ten batches, does not count once it is full.

    Args:
        ends: the event after each step.
        usable_bytes: of the device; None: unknown.
    """
    if len(ends) < _LEAST_STEPS:
        return ()
    made, freed = _times(trace)
    after = np.array(ends)[:, None]
    held = (made < after) & (freed >= after)
    setup = next((end for name, _, end in trace.phases if name == "setup"), 0)
    others = ~np.isin(trace.category, _KNOWN) & held.any(0) & (made >= setup)
    growth = []
    for line, numbers in _by_line(trace, row_lines, np.flatnonzero(others)):
        if added := _added(held[:, numbers], _blocks(trace)[numbers]):
            growth.append(MemoryGrowth(file=line.file, line=line.line, bytes=added))
    if sum(each.bytes for each in growth) * _LONG_RUN <= (usable_bytes or 0):
        growth.clear()
    weights = np.flatnonzero(np.isin(trace.category, _WEIGHTS) & held.any(0))
    if added := _more_weights(held[:, weights], _blocks(trace)[weights]):
        line = _line(trace, row_lines, int(weights[held[-1, weights]][-1]))
        growth.append(MemoryGrowth(file=line.file, line=line.line, bytes=added, of_weights=True))
    return tuple(sorted(growth, key=lambda each: -each.bytes))


def _times(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """The events at which each storage is made and freed; past the last event where it is not."""
    made = np.full(len(trace.nbytes), len(trace.kind))
    freed = made.copy()
    for times, kind in ((made, ALLOCATE), (freed, FREE)):
        events = np.flatnonzero(trace.kind == kind)
        times[trace.storage[events]] = events
    return made, freed


def _blocks(trace: Trace) -> np.ndarray:
    return -(-trace.nbytes // _BLOCK) * _BLOCK


def _line(trace: Trace, row_lines: Sequence[Line], number: int) -> Line:
    row = int(trace.made_by[number])
    return row_lines[row] if row < len(row_lines) else NOWHERE


def _by_line(trace: Trace, row_lines: Sequence[Line], numbers: np.ndarray) -> list[tuple[Line, np.ndarray]]:
    lines: dict[Line, list[int]] = defaultdict(list)
    for number in numbers.tolist():
        lines[_line(trace, row_lines, number)].append(number)
    return [(line, np.array(own)) for line, own in lines.items()]


def _added(held: np.ndarray, nbytes: np.ndarray) -> int:
    """Bytes that what a line holds grows by with each step; 0 if it does not.

    Args:
        held: bool (steps, storages) of the line.
    """
    grows = np.diff(held @ nbytes)
    grows = grows[-max(_LEAST_STEPS - 1, len(grows) // 2) :]
    if (grows > 0).all() and (len(set(grows)) == 1 or len(grows) >= _REPLACED):
        return int(grows.mean())
    stays = held[1:] & held[:-1]  # without what the last step made: variables keep that until the next one
    added, continued, dropped_all = 0, 0, 0
    for before, after in itertools.pairwise(stays):
        if (before & ~after).any():
            if (before & after).any():
                return 0
            dropped_all += 1  # as at the begin of an epoch
        elif new := int((after & ~before) @ nbytes):
            added, continued = added + new, continued + bool(before.any())
    begins = dropped_all + (not stays[0].any())
    transitions = len(stays) - 1 - dropped_all
    return added // transitions if continued and 2 * continued >= transitions - begins else 0


def _more_weights(held: np.ndarray, nbytes: np.ndarray) -> int:
    """Bytes that weights and the optimizer's state grow by with each step, where they do so again and again."""
    grows = np.diff(held @ nbytes)[1:]  # the second step may be the first of some weights
    return int(grows.mean()) if (grows >= 0).all() and (grows > 0).sum() >= _LEAST_TIMES else 0
