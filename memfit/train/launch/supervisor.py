"""The parent of training processes: passes signals on, and ends children that do not end soon after one.

A training process ends by itself within ``watchdog.END_SECONDS`` of a signal. A C call that holds the interpreter's
lock (a regular expression without end) stops its watchdog too; then the parent kills it. A process that is still
importing its libraries has nothing to save, and is killed at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from memfit.train.launch.stop_signals import SIGNALS
from memfit.train.launch.watchdog import END_SECONDS

GRACE = 1.5
"""Seconds that a child has beyond its own limit."""
_LOOKS_EVERY = 0.1


class Supervisor:
    """Watches for signals while children run."""

    def __init__(self) -> None:
        self.signalled: float | None = None
        """When the first signal came, by ``time.monotonic``; None: none came."""
        self.killed = False
        """Whether children that trained had to be killed."""
        self.killed_early = False
        """Whether children were killed that had not begun."""
        self._closed = threading.Event()

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Guards while this is open. In the calling thread, which is the main one, signals wait until they are
        unblocked: the children inherit that, and hear them only once they can end cleanly.

        Signals are noted here and do nothing else, also after the close: the caller decides what they do then.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _no_action)
        thread = threading.Thread(target=self._guard, args=(reader,), name="memfit-supervisor", daemon=True)
        thread.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self._closed.set()
            thread.join()
            self._note_signals(reader)  # one that came since its last look
            signal.set_wakeup_fd(before)
            for descriptor in (reader, writer):
                os.close(descriptor)

    def _guard(self, reader: int) -> None:
        while not self._closed.wait(_LOOKS_EVERY):
            self._note_signals(reader)
            if self.signalled is None:
                continue
            late = time.monotonic() - self.signalled > END_SECONDS + GRACE
            for process in training_children():
                early = not _has_begun(process)
                if not (late or early):
                    continue
                self.killed |= not early
                self.killed_early |= early
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _note_signals(self, reader: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if any(number in SIGNALS for number in os.read(reader, 64)) and self.signalled is None:
                self.signalled = time.monotonic()


def _no_action(number: int, frame: object) -> None:
    """A handler, so that Python writes the signal into the pipe."""


def training_children() -> list[int]:
    """Ids of this process's children that train or validate (Linux)."""
    children: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, file.read_text().split())
    return [process for process in children if b"memfit.train.launch" in _command_of(process)]


def _has_begun(process: int) -> bool:
    """Whether a training process listens to signals: it begins with both blocked, and unblocks them."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        blocked = int(status.partition("\nSigBlk:")[2].split(None, 1)[0], 16)
    except (OSError, ValueError, IndexError):
        return True
    return not blocked >> (signal.SIGTERM - 1) & 1


def _command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a process that is sent the signals to stop too; its standard output is this process's standard error.

    Called inside ``Supervisor.guarding``: the child begins with both signals blocked.
    """
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        if not children:
            early.append(number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        with subprocess.Popen(command, env=dict(environment), stdout=sys.stderr) as child:
            children.append(child)
            for number in early:
                child.send_signal(number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
