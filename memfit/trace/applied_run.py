"""A run of a trace's first window, repeated as the second window of another trace repeats its own.

What the second window adds goes to the same place as there: to the run's begin or end, or in front of the first call of
an operator in a module, where the operator before it is the same, too. Where a place is not sure, nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.trace.repeated_run import (
    Call,
    RepeatedRun,
    all_equal,
    calls_of,
    events_before,
    events_of,
    makes_what_stays,
    places_behind,
)
from memfit.trace.window_runs import WindowRuns


@dataclass(frozen=True, kw_only=True, eq=False)
class Merged:
    """A run's operators or events in a second window, in order; each is either repeated or added."""

    repeated: np.ndarray
    """int: those of the first window, counted from its run's first one; -1 for those that are added."""
    added: np.ndarray
    """int: those of the other trace's second window, counted likewise; -1 for those that are repeated."""

    def where_repeated(self, of: np.ndarray) -> np.ndarray:
        """int: where those of the first window come. What precedes the run's first operator, -1, still does."""
        return _where(self.repeated, of)

    def where_added(self, of: np.ndarray) -> np.ndarray:
        """int: where those of the other trace come; -1 for those that are not added."""
        return _where(self.added, of)

    def column(self, own: np.ndarray, like: np.ndarray) -> np.ndarray:
        """A column of them, from that of the first window's run and that of the other trace's second window."""
        is_added, values = self.added >= 0, np.empty(len(self.added), np.int64)
        values[~is_added], values[is_added] = own[self.repeated[~is_added]], like[self.added[is_added]]
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class AppliedRun:
    """A run of a second window, made by ``applied_run``."""

    operators: Merged
    events: Merged
    event_operators: np.ndarray
    """int: the operator of each event, counted from the run's first one."""


def applied_run(like: RepeatedRun, second: WindowRuns, own: WindowRuns, stays: np.ndarray) -> AppliedRun | None:
    """The run as the second window has it; None where that is not sure.

    Args:
        like: how the other trace repeats it.
        second: the other trace's second window.
        own: the first window. S: its trace's storages.
        stays: bool (S,), the storages that it makes for all later ones.
    """
    run, calls = like.run, calls_of(own, like.run)
    is_omitted = makes_what_stays(own, run, stays) & np.array([call in like.omitted for call in calls], bool)
    if tuple(calls[row] for row in np.flatnonzero(is_omitted)) != like.omitted:
        return None
    kept, repeated = np.flatnonzero(~is_omitted), np.flatnonzero(own.repeated_events(run, stays))
    kinds, _, event_operators = events_of(own, run, repeated)
    places = places_behind(kept, event_operators)
    same = _same_places(like, [calls[row] for row in kept], kinds, places)
    if same is None:
        return None
    operator_places, event_places = (
        np.array([same[place] for place in some.tolist()], int) for some in (like.operator_places, like.event_places)
    )
    operators = _merged(kept, operator_places, like.operators)
    events = _merged(repeated, np.searchsorted(places, event_places, side="right"), like.events)
    of_added = operators.where_added(second.offsets(run)[like.events])
    in_front = event_places + np.searchsorted(operator_places, event_places) - 1
    of_events = np.empty(len(events.added), int)
    of_events[events.added < 0] = operators.where_repeated(event_operators)
    of_events[events.added >= 0] = np.where(of_added >= 0, of_added, in_front)
    return AppliedRun(operators=operators, events=events, event_operators=of_events)


def _same_places(
    like: RepeatedRun, calls: Sequence[Call], kinds: np.ndarray, places: np.ndarray
) -> dict[int, int] | None:
    """By place in the other trace where something is added, the one here; None where it is not sure.

    Args:
        like: how the other trace repeats the run.
        calls: the operators that are repeated.
        kinds: int8 (events,), the kind of each event that is repeated.
        places: int (events,), the place behind the operator of each.
    """
    first_like, first = _first_calls(like.calls), _first_calls(calls)
    same: dict[int, int] = {}
    for place in sorted({*like.operator_places.tolist(), *like.event_places.tolist()}):
        if place in (0, len(like.calls)):
            own = len(calls) if place else 0
        else:
            call, own = like.calls[place], first.get(like.calls[place], 0)
            if first_like[call] != place or own == 0 or calls[own - 1] != like.calls[place - 1]:
                return None
        here, there = kinds[places == own], like.kinds[like.places == place]
        if own < max(same.values(), default=0) or events_before(places, own) is None or not all_equal((here, there)):
            return None  # where its operator frees something else, that may be freed before or after what is added
        same[place] = own
    return same


def _first_calls(calls: Sequence[Call]) -> dict[Call, int]:
    """Where each operator of a module is first called."""
    return {call: row for row, call in reversed([*enumerate(calls)])}


def _merged(repeated: np.ndarray, where: np.ndarray, added: np.ndarray) -> Merged:
    return Merged(repeated=np.insert(repeated, where, -1), added=np.insert(np.full(len(repeated), -1), where, added))


def _where(column: np.ndarray, of: np.ndarray) -> np.ndarray:
    where = np.full(max(int(column.max(initial=-1)), int(of.max(initial=-1))) + 2, -1)
    where[column[column >= 0]] = np.flatnonzero(column >= 0)
    places: np.ndarray = where[of]
    return places
