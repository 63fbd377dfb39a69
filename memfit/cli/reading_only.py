"""A context for code of a person's that runs unasked: it may read, and neither writes nor reaches the network.

By Python's audit events: what a library does in its own compiled code is not seen.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from memfit.planner.dependencies import writes

_REFUSED = frozenset(
    ("os.chflags", "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.link", "os.mkdir", "os.posix_spawn",
     "os.remove", "os.removexattr", "os.rename", "os.rmdir", "os.setxattr", "os.spawn", "os.symlink", "os.system",
     "os.truncate", "os.utime", "pty.spawn", "socket.bind", "socket.connect", "socket.getaddrinfo",
     "socket.gethostbyname", "socket.sendmsg", "socket.sendto", "sqlite3.connect", "subprocess.Popen")
)  # fmt: skip
_inside = [False]


@contextmanager
def reading_only(*, seconds: float, more_bytes: int) -> Iterator[None]:
    """Inside, what writes, starts processes or connects raises ``PermissionError``, in every thread.

    Args:
        seconds: of the processor, after which ``TimeoutError`` is raised.
        more_bytes: that the process may take beside what it has; a ``MemoryError`` follows.
    """
    _install_hook()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGVTALRM, _time_is_spent)
    _inside[0] = True
    try:
        most = _data_bytes() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most if limits[1] < 0 else min(most, limits[1]), limits[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _inside[0] = False
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _time_is_spent(number: int, frame: object) -> None:
    raise TimeoutError("the time for it is spent")


def _data_bytes() -> int:
    """What counts towards RLIMIT_DATA."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmData"].split()[0]) << 10


@cache
def _install_hook() -> None:
    """An audit hook cannot be taken out again; outside of the context it does nothing."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if not _inside[0]:
            return
        is_write = event == "open" and writes(arguments[1], arguments[2]) and arguments[0] != os.devnull
        if is_write or event in _REFUSED:
            raise PermissionError(f"{event} {arguments[0] if arguments else ''}: it was to read only")

    sys.addaudithook(hook)
