"""SIGINT, SIGTERM and SIGHUP: the run is to stop soon, with nothing half done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import NoReturn

from memfit.errors import Exit

_HANGS_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *_HANGS_UP)
"""Not SIGHUP under nohup, which has it ignored: the run goes on without its terminal."""
PATIENCE = 5.0
"""Seconds that a window may go on for once the run is to stop; a longer one is abandoned where that leaves no trace."""


class AbandonedError(BaseException):
    """The run is to stop, and what it is at is given up. No error of a job: nothing there should catch it."""


def ends_at_once(on_signal: Callable[[], None]) -> None:
    """Until there is something to save, a signal ends the process. A signal that came before this call does so now.

    The handler raises nothing: Python swallows what is raised inside of a ``__del__``, and libraries what is raised
    while they are imported.

    Args:
        on_signal: called before the process ends.
    """

    _end_on_signals(on_signal)
    _leave_forks_alone(os.getpid())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _end_on_signals(on_signal: Callable[[], None]) -> None:
    def end(number: int, frame: FrameType | None) -> NoReturn:
        on_signal()
        os._exit(Exit.STOPPED)

    for number in SIGNALS:
        signal.signal(number, end)


@contextmanager
def ended_by_signals(on_signal: Callable[[], None]) -> Iterator[None]:
    """Inside, a signal ends this process as ``ends_at_once`` does; then signals do what they did before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _end_on_signals(on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with(code: int, line: str = "") -> None:
    """From now on a signal ends the process with this exit code: what it still does can be left out.

    Args:
        line: what is then written to standard output instead.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        if line:
            with suppress(OSError):
                os.write(1, f"{line}\n".encode())
        os._exit(code)

    for number in SIGNALS:
        signal.signal(number, end)


@cache
def _leave_forks_alone(process: int) -> None:
    """Processes that the job forks from this one, such as a loader's workers, do not inherit its handlers.

    They would write the run's outcome, ignore the SIGTERM that their loader ends them with, or wake the watchdog of
    this process through its pipe. They ignore SIGINT, which a terminal sends to all: this process needs them for the
    window at hand, and ends them itself.
    """

    def reset() -> None:
        if os.getppid() == process:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in (signal.SIGTERM, *_HANGS_UP):
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=reset)


class Stop:
    """Set by a signal. A window is finished or abandoned, a validation abandoned, a checkpoint finished."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._abandons = False
        for number in SIGNALS:
            signal.signal(number, self._ask)

    @property
    def impatient(self) -> bool:
        """Whether a window has gone on for too long since."""
        return self.asked and time.monotonic() - self._since > PATIENCE

    @contextmanager
    def abandons(self) -> Iterator[None]:
        """Inside, a signal raises ``AbandonedError``, and so does one that has come before."""
        self._abandons = True
        try:
            if self.asked:
                raise AbandonedError
            yield
        finally:
            self._abandons = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._since = True, time.monotonic()
        if self._abandons:
            self._abandons = False
            raise AbandonedError
