"""A process that memfit starts ends when the process that started it does, however that ends (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator

import psutil

from memfit.errors import Exit

PARENT = "MEMFIT_PARENT"
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: orphans among the descendants of a process become its children."""


def for_child() -> dict[str, str]:
    """What the child's environment must hold."""
    return {PARENT: str(os.getpid())}


def error_descriptor() -> int:
    """The file descriptor that a child's output goes to: that of ``sys.stderr``, or the process's own where that is no
    file (a notebook, output that is captured)."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2


def die_with_parent() -> None:
    """Asks the system to kill this process when its parent ends; ends it at once where the parent already has."""
    if sys.platform == "linux" and PARENT in os.environ:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):
            sys.exit(Exit.STOPPED)


@contextlib.contextmanager
def no_orphans(patience: float = 2.0) -> Iterator[None]:
    """Processes that are started inside and outlive whoever started them are ended at the close (Linux).

    A process that is killed cannot end the workers that it started, such as those of a loader.

    Args:
        patience: seconds that they have to end by themselves.
    """
    before = children()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    try:
        yield
    finally:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SUBREAPER, 0)
        own = [child for child in psutil.Process().children() if child.pid not in before]
        left = [process for child in own for process in (child, *_descendants(child))]
        for process in psutil.wait_procs(left, timeout=patience)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=patience)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


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
