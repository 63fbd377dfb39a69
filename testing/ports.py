"""Ports for ranks of tests, of which no two processes of tests take one at a time."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from pathlib import Path
from typing import IO

FIRST, LAST = 20_000, 31_999
"""Below those that Linux gives to whoever asks for any: nobody else gets one between its choice and its use."""
_HELD: deque[IO[bytes]] = deque()
HELD = 64
"""Ports that a process keeps for itself, the newest ones."""


@atexit.register
def _let_go() -> None:
    for file in _HELD:
        file.close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens, and which no other process of tests is given while this one has it.

    Raises:
        OSError: there is none.
    """
    folder = Path(tempfile.gettempdir()) / f"memfit-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    ports = list(range(FIRST, LAST + 1))
    random.Random(os.urandom(8)).shuffle(ports)
    for port in ports:
        file = (folder / str(port)).open("ab")
        with contextlib.suppress(OSError), socket.socket() as listener:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listener.bind((host, port))
            _HELD.append(file)
            if len(_HELD) > HELD:
                _HELD.popleft().close()
            return port
        file.close()
    raise OSError(f"no port from {FIRST} to {LAST} is free on {host}")
