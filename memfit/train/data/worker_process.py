"""What a worker does before it reads: it ends with the process that trains, leaves signals to it, and opens the data
set's files again.

A forked process shares the position in each open file with its parent. Two processes that seek and read in one file
would give each other the wrong bytes, and no error. So each worker opens the regular files that it inherited once
more, at the same position and under the same descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import stat
from dataclasses import dataclass, field

from memfit.torch_compat.data_workers import hide_worker_info

STACK_SIGNAL = signal.SIGUSR1
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


@dataclass(frozen=True)
class WorkerStart:
    """Called in each worker with its number. Made in the process that trains, before workers are forked."""

    parent: int = field(default_factory=os.getpid)
    files: dict[int, int] = field(default_factory=lambda: open_files())
    """Position by descriptor."""
    stacks: tuple[int, ...] = ()
    """A descriptor for each worker, to which it writes its stack at ``STACK_SIGNAL``."""

    def __call__(self, number: int) -> None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != self.parent:
            os._exit(0)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        hide_worker_info()
        if self.stacks:
            faulthandler.register(STACK_SIGNAL, file=self.stacks[number], all_threads=False)
        for descriptor, position in self.files.items():
            _open_again(descriptor, position)


def open_files() -> dict[int, int]:
    """Regular files that this process can read, by descriptor, with the position in each (Linux)."""
    files: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            with contextlib.suppress(OSError):
                readable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
                if descriptor > 2 and readable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                    files[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return files


def _open_again(descriptor: int, position: int) -> None:
    """Opens a file once more under its descriptor; one that cannot be stays shared."""
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
        inheritable = os.get_inheritable(descriptor)
        again = os.open(f"/proc/self/fd/{descriptor}", flags)
        try:
            os.lseek(again, position, os.SEEK_SET)
            os.dup2(again, descriptor, inheritable)
        finally:
            os.close(again)
