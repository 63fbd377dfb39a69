"""A process that trains ends with whoever started it, and has its run's folder to itself.

Without that, a ``memfit run`` that is killed would leave its training process behind, writing beside a resumed run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from memfit.errors import Exit, InputError

PARENT = "MEMFIT_PARENT"
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def for_child() -> dict[str, str]:
    """What the child's environment must hold."""
    return {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """From now on the system kills this process when the one that started it ends; it may already have (Linux)."""
    if sys.platform == "linux" and PARENT in os.environ:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):
            sys.exit(Exit.STOPPED)


@contextlib.contextmanager
def alone_in(folder: Path, patience: float = 10.0) -> Iterator[None]:
    """Holds a run's folder against other processes, as long as this one lives.

    Args:
        patience: seconds to wait for one that is just being killed.

    Raises:
        InputError: another process trains in it.
    """
    handle = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    write = "wait until it ends, stop it, or write another --out"
                    raise InputError(f"run folder {folder}", "another process trains in it", write) from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)
