"""Environment variables of a trace: what a job sets while it is traced ends with the trace, as with a process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memfit.device.virtual.patching import replaced

_environ = os.environ
"""The process's own variables, whatever ``os.environ`` is replaced with for a while."""


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """A context that restores the environment variables that code inside sets or deletes.

    What a module sets while it is imported inside stays: no later trace imports it again.
    """
    before, outside, variables = dict(_environ), _module_frames(), type(_environ)
    set_variable, delete_variable = variables.__setitem__, variables.__delitem__

    def set_and_note(self: Any, name: str, value: str) -> None:
        set_variable(self, name, value)
        if self is _environ and _module_frames() - outside:
            before[name] = value

    def delete_and_note(self: Any, name: str) -> None:
        delete_variable(self, name)
        if self is _environ and _module_frames() - outside:
            before.pop(name, None)

    try:
        with replaced(variables, __setitem__=set_and_note, __delitem__=delete_and_note):
            yield
    finally:
        for name in _environ.keys() - before.keys():
            del _environ[name]
        for name, value in before.items():
            if _environ.get(name) != value:
                _environ[name] = value


def _module_frames() -> set[FrameType]:
    """The frames of this thread that run a module's own code, as its import does."""
    frames: set[FrameType] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            frames.add(frame)
        frame = frame.f_back
    return frames
