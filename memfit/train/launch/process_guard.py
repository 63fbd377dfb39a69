"""A process that trains ends with whoever started it, and has its run's folder to itself.

Without that, a ``memfit run`` that is killed would leave its training process behind, writing beside a resumed run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from memfit.child_process import PARENT, die_with_parent, for_child
from memfit.errors import InputError

__all__ = ["PARENT", "alone_in", "die_with_parent", "for_child"]


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
