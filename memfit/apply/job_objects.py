"""Calls of what a job made: its samples, schedules and batches, in which a library raises and no line of the job is."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from memfit.engine.collectives import is_memory_failure
from memfit.errors import InputError, describe, line_of_job


@contextmanager
def job_object(seen: str, write: str) -> Iterator[None]:
    """Around a call of such an object. An exception with a line of the job's code in it passes: that line is named.

    Args:
        seen: what is called, for a person.
        write: what to write instead.

    Raises:
        InputError: the call raised, and not since memory ran out.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or is_memory_failure(error):
            raise
        if line_of_job(traceback.walk_tb(error.__traceback__)) is not None:
            raise
        raise InputError(seen, describe(error), write) from error
