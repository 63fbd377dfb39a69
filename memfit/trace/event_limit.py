"""The most events that a trace may make: a search traces sizes that nobody asked for, and a step may grow with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from memfit.errors import InputError

_limits = [sys.maxsize]
"""Open limits; not by thread, since a backward allocates in threads of its own."""


class TooManyEventsError(InputError):
    """A trace ended at the most events that it may make."""

    def __init__(self, count: int) -> None:
        super().__init__("the trace", f"it makes more than {count:,} allocations and frees", "ask for a smaller step")


@contextmanager
def most_events(count: int) -> Iterator[None]:
    """Context in which a trace that makes more events than this raises ``TooManyEventsError``."""
    _limits.append(min(count, _limits[-1]))
    try:
        yield
    finally:
        _limits.pop()


def event_limit() -> int:
    """The most events that a trace may make now."""
    return _limits[-1]


def far_more_than(events: int) -> int:
    """Events from which on a step has too little in common with another one of so many to say anything of it."""
    return 8 * events + 10_000
