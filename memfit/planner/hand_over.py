"""Questions that are handed over to a process which has the job loaded: it traces them and keeps what it traced.

Such a process is a copy of one that was asked of the same job, and listens at a socket in the user's cache
(``memfit.cli.loaded_copy``). Who asks then neither imports torch nor loads the job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from memfit.device.hardware.process_limits import available_cores
from memfit.job import Shape

PATIENCE = 5.0
"""Seconds without an answer, and without any time of the processor for the process that traces, after which it is given
up: a copy of a process may wait for a thread that it does not have."""
LOOK = 0.05
"""Seconds between two looks at whether another process has kept meanwhile what is waited for."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group behind a socket."""
KEPT = b"kept"
"""The answer where a step was traced and kept, or an epoch's units were."""
COUNT_EPOCH = b"count an epoch"
"""The request for an epoch's units, in place of a step."""


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """A step to trace; as of ``AskedJob.question``."""

    shape: Shape
    device: str
    changes: Mapping[str, Any]
    derive: bool
    choices: Mapping[str, Any]

    def to_json(self) -> bytes | None:
        """None where it holds what JSON does not."""
        values = asdict(self)
        with suppress(TypeError, ValueError):
            text = json.dumps(values, allow_nan=False)
            return text.encode() if json.loads(text) == values else None
        return None

    @classmethod
    def from_json(cls, text: bytes) -> HandedOver:
        """What ``to_json`` wrote."""
        values = json.loads(text)
        return cls(**values | {"shape": Shape(**values["shape"])})


class LoadedElsewhere:
    """The process that has a job loaded, where there is such a process. Each step is traced by a copy of it.

    Args:
        path: of its socket.
        is_kept: whether a step is kept by now: the background may have begun to trace it before.
    """

    def __init__(self, path: Path, is_kept: Callable[[HandedOver], bool]) -> None:
        self._path, self._is_kept = path, is_kept
        self._is_there = True

    def listens(self) -> bool:
        """Whether the process is still there."""
        with suppress(OSError):
            connected(self._path).close()
            return self._is_there
        return False

    def trace(self, step: HandedOver) -> bool:
        """Has a step traced and kept; False: who asks traces it."""
        request = step.to_json() if self._is_there else None
        if request is None:
            return False
        try:
            with Handed(self._path, request) as handed:
                return handed.is_kept(partial(self._is_kept, step))
        except (OSError, EOFError, ValueError):
            self._is_there = False
            return False

    def trace_each(self, steps: Sequence[HandedOver]) -> None:
        """Has steps traced and kept, as many at once as there are cores."""
        count = available_cores()
        for some in (steps[first : first + count] for first in range(0, len(steps), count)):
            requests = [(step, request) for step in some if (request := step.to_json()) is not None and self._is_there]
            try:
                with ExitStack() as stack:
                    handed = [(step, stack.enter_context(Handed(self._path, request))) for step, request in requests]
                    for step, each in handed:
                        each.is_kept(partial(self._is_kept, step))
            except (OSError, EOFError, ValueError):
                self._is_there = False

    def begin_epoch_count(self) -> Handed | None:
        """A context with an epoch that the process counts; does not wait for it. None: there is no such process."""
        with suppress(OSError):
            return Handed(self._path, COUNT_EPOCH) if self._is_there else None
        return None


class Handed:
    """A context with what another process is asked for, which ends where that is no longer needed.

    The process that listens may still set the job up, before it makes a copy that traces.

    Raises:
        OSError, EOFError, ValueError: there is no such process.
    """

    def __init__(self, path: Path, request: bytes) -> None:
        self._connection = connected(path)
        self._process = 0
        """Of the copy that traces; 0 until it has said it, and once nobody waits for it."""
        try:
            self._listens = _process_behind(self._connection)
            self._connection.send_bytes(request)
        except OSError:
            self._connection.close()
            raise

    def __enter__(self) -> Handed:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process and not self._connection.poll():  # it has not ended, and nobody needs what it traces
            with suppress(OSError):
                os.kill(self._process, signal.SIGTERM)
        self._connection.close()

    def is_kept(self, is_kept_already: Callable[[], bool] = bool) -> bool:
        """Whether the step was traced, or the epoch counted, and that was kept; waits for it.

        Args:
            is_kept_already: whether another process has kept it meanwhile; its copy then need not.

        Raises:
            OSError, EOFError, ValueError: the process has ended, or does nothing.
        """
        process = self._answer(is_kept_already)
        if process is None:
            return True
        self._process = int(process)
        answer = self._answer(is_kept_already)
        if answer is None:
            return True
        self._process = 0
        return answer == KEPT

    def _answer(self, is_kept_already: Callable[[], bool]) -> bytes | None:
        """Waits for an answer while the process works; None where what was asked for is kept already."""
        before, since = -1, time.monotonic()
        while not self._connection.poll(LOOK):
            if is_kept_already():
                return None
            if time.monotonic() - since >= PATIENCE:
                ticks = _ticks(self._process or self._listens)
                if ticks == before:
                    raise TimeoutError
                before, since = ticks, time.monotonic()
        return self._connection.recv_bytes()


def connected(path: Path) -> Connection:
    """A connection to the process that listens at a path.

    Raises:
        OSError: there is none.
    """
    with short_name(path) as name, socket.socket(socket.AF_UNIX) as client:
        client.connect(name)
        return Connection(client.detach())


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name by which a socket's path, of any length, may be bound or connected to (Linux: names have 107 bytes)."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _process_behind(connection: Connection) -> int:
    """The process that listens at the other end of a connection (unix(7): SO_PEERCRED); 0: one that cannot be seen."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _ticks(process: int) -> int:
    """Time of the processor that a process has taken, in the system's ticks (proc(5): utime and stime).

    Raises:
        OSError: it has ended.
    """
    if not process:
        return 0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
