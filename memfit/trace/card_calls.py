"""Scratch that depends on the card in a trace: cards on which it alone differs share the trace.

``Trace.card_calls`` has a text for each such call: its description (``memfit.device.virtual.card_scratch``) and, behind
an @ each, for every moment at which it takes its scratch, how many events of its operator come before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.device.virtual.card_rules import CardRules, card_rules, plain
from memfit.device.virtual.card_scratch import card_scratch
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.trace.cublas_workspaces import with_workspaces_of
from memfit.trace.trace_columns import scratch_of, without_storages


def trace_on(trace: Trace, device: Device) -> Trace:
    """A trace that another card shares, with what its libraries take there; the trace itself where that is the same.

    The other card answers the same to what the trace asked of its own.
    """
    return with_card_scratch(with_workspaces_of(trace, device), device) if device.is_cuda else trace


@dataclass(frozen=True, kw_only=True, eq=False)
class _Moments:
    """When calls take scratch that depends on the card, one moment after another. M moments."""

    row: np.ndarray
    """int (M,): the operator."""
    place: np.ndarray
    """int (M,): how many events of the operator come before it, scratch aside."""
    nbytes: np.ndarray
    """int64 (M,)."""


def with_card_scratch(trace: Trace, device: Device) -> Trace:
    """The trace with the scratch that its described calls take on a card."""
    if trace.operator_card_call is None or not any(trace.card_calls):
        return trace
    moments = _moments(trace, plain(card_rules(device)))
    is_described = np.array([bool(call) for call in trace.card_calls])[trace.operator_card_call]
    taken = np.flatnonzero(scratch_of(trace) & (trace.made_by >= 0) & is_described[trace.made_by])
    order = _made_at(trace)[taken].argsort()
    if np.array_equal(trace.made_by[taken[order]], moments.row) and np.array_equal(
        trace.nbytes[taken[order]], moments.nbytes
    ):
        return trace
    return _with_moments(without_storages(trace, taken), moments)


def without_card_scratch(trace: Trace) -> Trace:
    """The trace without the scratch of its described calls."""
    if trace.operator_card_call is None or not any(trace.card_calls):
        return trace
    is_described = np.array([bool(call) for call in trace.card_calls])[trace.operator_card_call]
    is_taken = scratch_of(trace) & (trace.made_by >= 0) & is_described[trace.made_by]
    return without_storages(trace, np.flatnonzero(is_taken))


def _moments(trace: Trace, card: CardRules) -> _Moments:
    """The moments at which a card takes something."""
    assert trace.operator_card_call is not None
    places, sizes = [], []
    for call in trace.card_calls:
        description, *counts = call.split(" @")
        nbytes = card_scratch(card, description) if description else 0
        places.append([*map(int, counts)] if nbytes else [])
        sizes.append(nbytes)
    has_events = np.zeros(len(trace.operator_name), bool)
    has_events[trace.operator] = True
    takes = np.array([bool(some) for some in places])[trace.operator_card_call]
    rows = np.flatnonzero(takes & has_events)
    calls = trace.operator_card_call[rows].tolist()
    times = [len(places[call]) for call in calls]
    return _Moments(
        row=np.repeat(rows, times), place=np.array([*chain(*(places[call] for call in calls))], int),
        nbytes=np.repeat(np.array([sizes[call] for call in calls], np.int64), times),
    )  # fmt: skip


def _made_at(trace: Trace) -> np.ndarray:
    """int (S,): the event that makes each storage."""
    events = np.flatnonzero(trace.kind == ALLOCATE)
    made_at = np.full(len(trace.nbytes), len(trace.kind))
    made_at[trace.storage[events]] = events
    return made_at


def _with_moments(trace: Trace, moments: _Moments) -> Trace:
    """The trace with scratch at moments; storages are numbered as by ``memfit.trace.operator_scratch.with_scratch``."""
    rows, first = np.unique(trace.operator, return_index=True)
    positions = first[np.searchsorted(rows, moments.row)] + moments.place
    order = positions.argsort(kind="stable")
    positions, row, nbytes = positions[order], moments.row[order], moments.nbytes[order]
    count = len(positions)
    new = len(trace.nbytes) + np.arange(count)
    twice = np.repeat(positions, 2)
    kind = np.insert(trace.kind, twice, np.tile(np.array([ALLOCATE, FREE], trace.kind.dtype), count))
    storage = np.insert(trace.storage, twice, np.repeat(new, 2))
    is_scratch = np.append(scratch_of(trace), np.ones(count, bool))
    columns: dict[str, Any] = {
        "nbytes": np.append(trace.nbytes, nbytes),
        "category": np.append(trace.category, np.full(count, CATEGORIES.index("workspace"))),
        "stream": np.append(trace.stream, np.zeros(count)),
        "made_by": np.append(trace.made_by, row),
    }
    made = np.flatnonzero(kind == ALLOCATE)
    when = np.full(len(is_scratch), len(kind))
    when[storage[made]] = made
    by_number = np.lexsort((np.where(is_scratch, when, np.arange(len(is_scratch))), is_scratch))
    numbers = np.empty(len(is_scratch) + 1, int)
    numbers[by_number], numbers[-1] = np.arange(len(is_scratch)), -1

    def moved(position: int, side: str) -> int:
        return position + 2 * int(np.searchsorted(positions, position, side="right" if side == "end" else "left"))

    return replace(
        trace,
        kind=kind,
        storage=numbers[storage].astype(trace.storage.dtype),
        operator=np.insert(trace.operator, twice, np.repeat(row, 2)),
        phases=tuple((name, moved(start, "start"), moved(end, "end")) for name, start, end in trace.phases),
        **{
            name: column[by_number].astype(getattr(trace, name).dtype) for name, column in columns.items()
        },
    )  # fmt: skip
