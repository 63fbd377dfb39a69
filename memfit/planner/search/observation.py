"""Observation: what each unit of a layout keeps, takes for itself and costs, read from one traced micro-batch.

A turn's activations are what its forward made and left alive for its backward. At any event

    live bytes = rest + sum over units of the activations that are alive there

and a unit's own peak, in the forward or in the backward, is the largest ``rest + its own activations`` over the events
of its operators. What other units keep at that moment is left out, so that other choices for them can be put in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.events import ALLOCATE, FREE, Trace
from memfit.planner.search.layout import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorPosition:
    """A moment at which memory may be highest, in a turn: bytes of the rest, and what of each unit is alive then."""

    turn: int
    rest: float
    alive: np.ndarray
    """float (units,): the part of what a unit keeps that is there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """Bytes by turn and unit (or block), and seconds by unit."""

    kept: np.ndarray
    """float (turns, units)."""
    unit_peak: np.ndarray
    """float (turns, 2, units): own peaks in the forward and the backward; 0 where the unit does not run."""
    block_peak: np.ndarray
    """float (turns, 2, blocks)."""
    seconds: np.ndarray
    """float (units,): of all operators that belong to the unit."""
    total_seconds: float
    peak: float
    """Of the turns' forwards and backwards."""
    resident: float
    """Bytes that are there before the micro-batch."""
    unit_alive: np.ndarray
    """float (turns, 2, units, units): what is alive of each unit (last) at a unit's own peak."""
    block_alive: np.ndarray
    """float (turns, 2, blocks, units)."""
    gaps: list[OperatorPosition]
    """Moments between the units."""


def observe(trace: Trace, seconds: np.ndarray, layout: Layout) -> Observation:
    """Reads one traced micro-batch.

    Args:
        seconds: float (operators,), of each operator.
    """
    units, blocks = len(layout.units), len(layout.blocks)
    unit_of = layout.of_modules(trace.modules)[trace.operator_module]
    backward = np.array([part == "backward" for part in trace.parts])[trace.operator_part]
    turn_of = np.concatenate([[0], np.cumsum(backward[:-1] & ~backward[1:])])
    turns = int(turn_of[backward].max(initial=-1)) + 1
    size = trace.nbytes[trace.storage]
    change = np.where(trace.kind == ALLOCATE, size, np.where(trace.kind == FREE, -size, 0))
    live = np.cumsum(change).astype(float)
    made, gone = np.full(len(trace.nbytes), len(live)), np.full(len(trace.nbytes), len(live))
    made[trace.storage[trace.kind == ALLOCATE]] = np.flatnonzero(trace.kind == ALLOCATE)
    gone[trace.storage[trace.kind == FREE]] = np.flatnonzero(trace.kind == FREE)
    observation = Observation(
        kept=np.zeros((turns, units)),
        unit_peak=np.zeros((turns, 2, units)),
        block_peak=np.zeros((turns, 2, blocks)),
        seconds=np.bincount(unit_of[unit_of >= 0], weights=seconds[unit_of >= 0], minlength=units),
        total_seconds=float(seconds.sum()),
        peak=float(live[np.isin(trace.operator, np.flatnonzero(turn_of < turns))].max(initial=0)),
        resident=float(trace.nbytes[trace.made_by < 0].sum()),
        unit_alive=np.zeros((turns, 2, units, units)),
        block_alive=np.zeros((turns, 2, blocks, units)),
        gaps=[],
    )
    for turn in range(turns):
        rows = np.flatnonzero((turn_of == turn) & backward)
        first = np.flatnonzero(turn_of == turn)[0]
        start, middle, end = np.searchsorted(trace.operator, [first, rows[0], rows[-1] + 1])
        storages = np.flatnonzero((made >= start) & (made < middle) & (gone >= middle))
        storages = storages[unit_of[trace.made_by[storages]] >= 0]
        owner = unit_of[trace.made_by[storages]]
        _read_turn(
            observation, layout, turn, live[start:end], unit_of[trace.operator[start:end]], middle - start, owner,
            trace.nbytes[storages], made[storages] - start, np.minimum(gone[storages], end) - start,
        )  # fmt: skip
    return observation


def _read_turn(
    observation: Observation, layout: Layout, turn: int, live: np.ndarray, unit_at: np.ndarray, middle: int,
    owner: np.ndarray, nbytes: np.ndarray, made: np.ndarray, gone: np.ndarray,
) -> None:  # fmt: skip
    """Fills one turn in. Events are counted from the turn's start; ``owner`` … ``gone`` are of its activations."""
    units = len(layout.units)
    observation.kept[turn] = np.bincount(owner, weights=nbytes, minlength=units)
    kept_bytes = np.maximum(observation.kept[turn], 1)

    def held(which: np.ndarray) -> np.ndarray:
        steps = np.zeros(len(live) + 1)
        np.add.at(steps, made[which], nbytes[which])
        np.add.at(steps, gone[which], -nbytes[which])
        return np.cumsum(steps)[:-1]

    def alive(event: int) -> np.ndarray:
        there = (made <= event) & (event < gone)
        return np.bincount(owner[there], weights=nbytes[there], minlength=units) / kept_bytes

    rest = live - held(np.ones(len(owner), bool))
    is_backward = np.arange(len(live)) >= middle
    block_at = np.append(layout.block_of, -1)[unit_at]
    for kind, at, count, peaks, others in (
        ("unit", unit_at, units, observation.unit_peak, observation.unit_alive),
        ("block", block_at, len(layout.blocks), observation.block_peak, observation.block_alive),
    ):
        for group in range(count):
            events = np.flatnonzero(at == group)
            if not len(events):
                continue
            mine = owner == group if kind == "unit" else layout.block_of[owner] == group
            own = rest + held(mine)
            for index in range(2):
                chosen = events[is_backward[events] == bool(index)]
                if len(chosen):
                    top = chosen[np.argmax(live[chosen])]
                    peaks[turn, index, group] = own[chosen].max()
                    others[turn, index, group] = alive(int(top))
    outside = np.flatnonzero(unit_at < 0)
    for run in np.split(outside, np.flatnonzero(np.diff(outside) > 1) + 1):
        if len(run):
            top = int(run[np.argmax(live[run])])
            observation.gaps.append(OperatorPosition(turn=turn, rest=float(rest[top]), alive=alive(top)))
