"""Calls whose scratch depends on the card, of steps between two sizes: the numbers that describe them on lines."""

from __future__ import annotations

import numpy as np

from memfit.events import Trace

Calls = tuple[np.ndarray | None, tuple[str, ...]]
"""``Trace.operator_card_call`` and ``Trace.card_calls``."""


def calls_between(low: Trace, high: Trace, part: tuple[int, int]) -> Calls | None:
    """The calls of a step between two that run the same operators; None where they do not lie on lines.

    Args:
        part: how far from ``low``, and how far ``high`` is.
    """
    first, last = low.operator_card_call, high.operator_card_call
    if first is None or last is None:
        return (None, ()) if first is last else None
    pairs, column = np.unique(np.stack([first, last]), axis=1, return_inverse=True)
    calls = [_between(low.card_calls[i], high.card_calls[j], *part) for i, j in pairs.T.tolist()]
    if None in calls:
        return None
    return column.reshape(-1).astype(np.int32), tuple(call for call in calls if call is not None)


def are_calls_of(trace: Trace, calls: Calls | None) -> bool:
    """Whether a trace's operators make these calls."""
    if calls is None:
        return False
    column, table = calls
    own = trace.operator_card_call
    if column is None or own is None:
        return own is column
    numbers: dict[str, int] = {}
    own_calls, other_calls = (
        np.array([numbers.setdefault(call, len(numbers)) for call in some], int) for some in (trace.card_calls, table)
    )
    return np.array_equal(own_calls[own], other_calls[column])


def _between(low: str, high: str, distance: int, whole: int) -> str | None:
    first, last = low.split(" "), high.split(" ")
    if len(first) != len(last):
        return None
    words = []
    for word, other in zip(first, last, strict=True):
        if word != other:
            if not (word.isdecimal() and other.isdecimal()):
                return None
            added, rest = divmod((int(other) - int(word)) * distance, whole)
            if rest:
                return None
            word = str(int(word) + added)
        words.append(word)
    return " ".join(words)
