"""Columns of a trace that was put together: its storages and names are numbered as a tracer numbers them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace

COSTS = ("operator_flops", "operator_bytes")
CARD_CALL = "operator_card_call"
OPERATORS = ("operator_name", "operator_module", "operator_part", *COSTS, CARD_CALL)
STORAGES = ("nbytes", "category", "stream")


def card_call_of(trace: Trace) -> np.ndarray:
    """int32 (O,): the numbers of calls, of a trace that other cards may share."""
    assert trace.operator_card_call is not None
    return trace.operator_card_call


def scratch_of(trace: Trace) -> np.ndarray:
    """bool (S,): storages that ``with_scratch`` has added: freed as soon as they are made."""
    at_once = (trace.kind[:-1] == ALLOCATE) & (trace.kind[1:] == FREE) & (trace.storage[:-1] == trace.storage[1:])
    chosen = np.zeros(len(trace.nbytes), bool)
    chosen[trace.storage[:-1][at_once]] = True
    return chosen & (trace.category == CATEGORIES.index("workspace"))


def without_storages(trace: Trace, storages: np.ndarray) -> Trace:
    """The trace without these storages; the others are numbered anew."""
    goes = np.zeros(len(trace.nbytes) + 1, bool)  # the last one stands for no storage
    goes[storages] = True
    stays, event_stays = ~goes[:-1], ~goes[trace.storage]
    numbers = np.append(np.cumsum(stays) - 1, -1)
    gone = np.append(0, np.cumsum(~event_stays))
    return replace(
        trace,
        kind=trace.kind[event_stays],
        storage=numbers[trace.storage[event_stays]].astype(trace.storage.dtype),
        operator=trace.operator[event_stays],
        phases=tuple((name, int(start - gone[start]), int(end - gone[end])) for name, start, end in trace.phases),
        **{name: getattr(trace, name)[stays] for name in ("nbytes", "category", "stream", "made_by")},
    )


def storage_numbers(kind: np.ndarray, storage: np.ndarray, is_scratch: np.ndarray) -> np.ndarray | None:
    """int (S,): the storages' numbers; None where one is made twice, or is freed twice or before it is made.

    Those that no event makes were made after the last phase.
    """
    made, freed = storage[kind == ALLOCATE], storage[kind == FREE]
    if min(made.min(initial=0), freed.min(initial=0)) < 0 or any(
        len(np.unique(some)) < len(some) for some in (made, freed)
    ):
        return None
    when = np.full(len(is_scratch), len(kind))
    when[made] = np.flatnonzero(kind == ALLOCATE)
    if (when[freed] > np.flatnonzero(kind == FREE)).any():
        return None
    numbers = np.empty(len(is_scratch), int)
    numbers[np.lexsort((when, is_scratch))] = np.arange(len(is_scratch))
    return numbers


def by_appearance(values: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column, and its table in the order in which the column's values first appear."""
    used, first = np.unique(values, return_index=True)
    ordered = used[np.argsort(first)]
    numbers = np.zeros(len(names), int)
    numbers[ordered] = np.arange(len(ordered))
    return numbers[values], tuple(names[number] for number in ordered.tolist())
