"""A process that memfit starts ends when the process that started it does, however that ends (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

import psutil

from memfit.errors import Exit

PARENT = "MEMFIT_PARENT"
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def for_child() -> dict[str, str]:
    """What the child's environment must hold."""
    return {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Asks the system to kill this process when its parent ends; ends it at once where the parent already has."""
    if sys.platform == "linux" and PARENT in os.environ:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):
            sys.exit(Exit.STOPPED)


def children() -> set[int]:
    """Process ids of this process's children."""
    return {child.pid for child in psutil.Process().children()}


def kill_children(module: str, keep: Iterable[int]) -> None:
    """Kills the children that run a module, and waits for them.

    Args:
        module: as it stands on their command line.
        keep: process ids that stay, those of ``children()`` before a start.
    """
    kept, ended = set(keep), []
    for child in psutil.Process().children():
        try:
            if child.pid not in kept and module in child.cmdline():
                child.kill()
                ended.append(child)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(ended, timeout=10)
