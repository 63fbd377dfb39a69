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
_OF_IMPORTS = 16 << 20
"""More than `memfit devices` takes beyond its first imports: 8 MiB with Python 3.11."""
_LINE = f"memfit: this command: {WHY}; {REMEDY}\n".encode()


def says_no_memory(error: BaseException) -> bool:
    """Tells whether an exception means that memory ran out.

    Python loses some of its own memory errors, seen under RLIMIT_DATA with Python 3.11.7: it raises a SystemError in
    their place ("error return without exception set"), or an ImportError where a library could not be mapped
    ("cannot import name 'sha512' from 'hashlib'"). So of an ImportError, whether there is memory is tried.
    """
    if isinstance(error, ImportError):
        return _is_full()
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    lost = isinstance(error, SystemError) and any(words in str(error) for words in _LOST)
    return lost or isinstance(error, MemoryError)


_LOST = ("without exception set", "without setting an exception")
"""How Python says that a call of its own failed for no reason it kept."""


def check_start() -> None:
    """Ends the process where it cannot have the memory that the imports of any command take.

    Python 3.11 spins for ever where memory runs out while it looks for the handler of an exception within an import
    (``exception_unwind`` in ceval.c begins anew where it cannot make the number of an instruction).
    """
    if _is_full():
        end_without_memory()


def _is_full() -> bool:
    """Whether this process cannot have as much more memory as the imports of a command take."""
    try:
        bytearray(_OF_IMPORTS)
    except MemoryError:
        return True
    return False


def end_without_memory() -> NoReturn:
    """Ends the process with one line and ``BAD_INPUT``, whatever else would have needed memory on the way out."""
    with suppress(OSError):
        os.write(2, _LINE)
    os._exit(BAD_INPUT)
