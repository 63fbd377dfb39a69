"""SIGINT and SIGTERM: the run is to stop soon, with nothing half done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from memfit.errors import Exit

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 5.0
"""Seconds that a window may go on for once the run is to stop; a longer one is abandoned where that leaves no trace."""


class AbandonedError(BaseException):
    """The run is to stop, and what it is at is given up. No error of a job: nothing there should catch it."""


def ends_at_once(on_signal: Callable[[], None]) -> None:
    """Until there is something to save, a signal ends the process. A signal that came before this call does so now.

    The handler raises nothing: Python swallows what is raised inside of a ``__del__``.

    Args:
        on_signal: called before the process ends.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        on_signal()
        os._exit(Exit.STOPPED)

    for number in SIGNALS:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class Stop:
    """Set by SIGINT and SIGTERM. A window is finished or abandoned, a validation abandoned, a checkpoint finished."""

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
