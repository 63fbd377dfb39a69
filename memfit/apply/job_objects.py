"""Calls of what a job made: its samples, schedules and batches, in which a library raises and no line of the job is."""

from __future__ import annotations

import traceback
from types import TracebackType

from memfit.engine.collectives import is_memory_failure
from memfit.errors import InputError, describe, line_of_job


class JobCall:
    """Around a call of such an object. An exception with a line of the job's code in it passes: that line is named.

    Args:
        seen: what is called, for a person.
        write: what to write instead.

    Raises:
        InputError: the call raised, and not since memory ran out.
    """

    def __init__(self, seen: str, write: str) -> None:
        self._seen, self._write = seen, write

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, InputError) or is_memory_failure(error):
            return
        if line_of_job(traceback.walk_tb(trace)) is None:
            raise InputError(self._seen, describe(error), self._write) from error
