"""What memfit says when something is wrong, and the exit code that goes with it."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same for every verb."""

    DONE = 0
    FAULT = 1
    """A fault of memfit."""
    BAD_INPUT = 2
    """One clear line says what was seen, why it is wrong and what to write."""
    NOTHING_FITS = 3
    CHECK_FAILED = 4
    """audit, verify, or probe outside its bound."""
    STOPPED = 5
    """Stopped, and can be resumed."""


class InputError(Exception):
    """Something the user wrote is wrong. Shown as one line, without a traceback; exit code 2.

    Args:
        seen: what was seen, quoted as it was written.
        why: why it is wrong.
        write: what to write instead.
    """

    def __init__(self, seen: str, why: str, write: str) -> None:
        self.seen, self.why, self.write = seen, why, write
        super().__init__(" ".join(f"{seen}: {why}; {write}".split()))
