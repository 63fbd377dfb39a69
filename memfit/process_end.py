"""The end of memfit's process: Python's own finalisation collects and frees what ends with the process anyway.

After a prediction, which has imported torch and a job's libraries, that takes 0.2 s and more. Libraries that report
what was not freed (nanobind, which triton is built with) have nothing to report so.
"""

import os
import stat
import sys
from contextlib import suppress


class QuickEnd:
    """An exit handler that ends the process with a code, behind every handler that was registered after it.

    Not where a regular file is open for writing: Python may have to write what it holds, or to delete it.
    """

    def __init__(self) -> None:
        self.code: object = None
        """Of the exit, once it is known; one that is no number leaves the end to Python."""

    def __call__(self) -> None:
        if not isinstance(self.code, int) or sys.platform != "linux" or writes_files():
            return
        with suppress(Exception):  # Python's own end says what is wrong with them
            sys.stdout.flush()
            sys.stderr.flush()
            _flush_libraries()
            os._exit(self.code & 0xFF)


def writes_files() -> bool:
    """Whether this process has regular files open for writing, beside its standard streams; True where that is not
    known (Linux alone says it)."""
    try:
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the folder that is being listed
                if int(name) > 2 and stat.S_ISREG(os.stat(f"/proc/self/fd/{name}").st_mode) and _is_written(name):
                    return True
    except (OSError, ValueError):
        return True
    return False


def _is_written(name: str) -> bool:
    with open(f"/proc/self/fdinfo/{name}") as info:
        flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
    return flags & os.O_ACCMODE != os.O_RDONLY


def _flush_libraries() -> None:
    """Writes what libraries in C have in the buffers of their streams."""
    if "ctypes" in sys.modules:
        sys.modules["ctypes"].CDLL(None).fflush(None)
