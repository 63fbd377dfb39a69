"""Room for Python's frames, so that a deep call does not have memory mapped and unmapped each time.

CPython keeps the frames of a thread in chunks of 16 KiB: a call for which the chunk has no room maps another, and
unmaps it when it returns (``push_chunk`` and ``_PyThreadState_PopFrame`` in Python/pystate.c, from 3.11 on). Where a
loop's calls begin at the end of a chunk, each of them does both: in a trace, up to a quarter of the time. A frame that
is larger gets a chunk of its size, whose rest is for the frames that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

CHUNK = 1 << 20
"""Bytes of the chunk: the power of two that holds the frame. Less than half of them are left, for some 4,000 frames;
those that are never used take no memory."""
_WORDS = CHUNK // 2 // 8
"""Of the frame, at least: it does not fit into what another such frame has left, but takes a chunk of its own."""


def in_frame_room(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function that is called in a large frame: what it calls has one chunk for its frames."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = call.__code__.replace(co_stacksize=_WORDS)
    with_room: Callable[Parameters, Result] = wraps(function)(
        FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    )
    return with_room
