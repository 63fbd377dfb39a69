"""The end of a command whose own memory ran out, written without needing any.

One of the first imports of the command line: nothing of torch, and nothing slow.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import NoReturn

WHY = "the memory that this process may take ran out"
REMEDY = "free some, or lift the limit that it was started under (ulimit -d)"
BAD_INPUT = 2
"""``memfit.errors.Exit.BAD_INPUT``, before anything of memfit is imported."""
_LINE = f"memfit: this command: {WHY}; {REMEDY}\n".encode()


def says_no_memory(error: BaseException) -> bool:
    """Tells whether an exception means that memory ran out.

    Python loses some of its own memory errors and raises a SystemError in their place, seen under RLIMIT_DATA with
    Python 3.11.7: "error return without exception set".
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    lost = isinstance(error, SystemError) and "without exception set" in str(error)
    return lost or isinstance(error, MemoryError)


def end_without_memory() -> NoReturn:
    """Ends the process with one line and ``BAD_INPUT``, whatever else would have needed memory on the way out."""
    with suppress(OSError):
        os.write(2, _LINE)
    os._exit(BAD_INPUT)
