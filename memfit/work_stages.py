"""The stage that long work is in, for whoever shows it to a person who waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []
_is_silent = False


def begin_stage(text: str) -> None:
    """Says what begins now, in words that continue "planning job.py:Job: "."""
    for listener in _listeners:
        listener(text)


@contextmanager
def stages_heard(listener: Callable[[str], None]) -> Iterator[None]:
    """Context in which ``listener`` is called with each stage that begins."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def fall_silent() -> None:
    """From now on this process tells nobody anything: it is a copy of one that tells the same."""
    global _is_silent
    _is_silent = True
    _listeners.clear()


def is_silent() -> bool:
    """Whether this process has fallen silent."""
    return _is_silent
