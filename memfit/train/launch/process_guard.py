"""A process that trains ends with whoever started it, and has its run's folder to itself.

Without that, a ``memfit run`` that is killed would leave its training process behind, writing beside a resumed run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from memfit.child_process import PARENT, die_with_parent, for_child
from memfit.errors import InputError
from memfit.printable import printable
from memfit.train.append_file import identity

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

__all__ = ["PARENT", "alone_in", "die_with_parent", "for_child", "is_held"]


@contextlib.contextmanager
def alone_in(folder: Path, patience: float = 10.0, *, inherited: bool = False) -> Iterator[None]:
    """Holds a folder against other processes, as long as this one lives.

    ``memfit run`` holds the run's folder before it touches anything in it; the process that writes checkpoints holds
    their folder, so that one that outlives its ``memfit run`` for a moment is waited for.

    Args:
        patience: seconds to wait for one that is just being killed.
        inherited: whether a program that takes this process's place (``os.execve``) holds the folder too.

    Raises:
        InputError: another process trains in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    os.set_inheritable(handle, inherited)
    held = identity(handle)
    until = time.monotonic() + patience
    try:
        while not _locked(handle, folder):
            if time.monotonic() > until:
                write = "wait until it ends, stop it, or write another --out"
                raise InputError(f"run folder {folder}", "another process trains in it", write)
            time.sleep(0.1)
        yield
    finally:
        if identity(handle) == held:  # else the job has closed it
            os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether a process that lives holds a folder by ``alone_in``, on this machine; False where that cannot be seen."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given up at once; a run that begins just now waits for it
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _locked(handle: int, folder: Path) -> bool:
    """Whether the folder is held now. A file system without locks lets it pass, and this is said."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        why = f"{folder} is not locked, since its file system has no locks: start no second run in it"
        print(printable(f"memfit: {why}"), file=sys.stderr)
    return True
