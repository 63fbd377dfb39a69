"""SIGINT, SIGTERM and SIGHUP end a verb within 10 seconds, with one line and an exit code, and nothing half-written.

Among the first imports of the command line: nothing of torch, and nothing slow.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

STOPPED = 5
"""``memfit.errors.Exit.STOPPED``, before anything of memfit is imported."""
END_SECONDS = 8.0
"""Seconds after which a verb ends though code of a job catches every exception."""
_AGAIN_SECONDS = 0.02
"""Seconds after which a signal that was dropped is sent again."""
_Handler = Callable[[int, Any], Any]
_came: set[int] = set()
"""Signals that came inside of ``interrupted_by``."""


class InterruptedVerb(KeyboardInterrupt):
    """A signal to stop. Where KeyboardInterrupt itself passes through ``exec``, as under a dataclass, Python ends by
    the signal, whatever was made of the exception (``run_eval_code_obj`` in Python/pythonrun.c)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def interrupted_by(numbers: list[int], code: int = STOPPED, line: str = "stopped") -> Iterator[None]:
    """Inside, the signals raise ``InterruptedVerb``; if the process has not ended ``END_SECONDS`` later, it ends.

    A signal that comes while an object is finalized (``__del__``), where Python drops exceptions, is sent again.
    Processes that are forked inside have the system's own handlers.

    Args:
        code, line: with which it then ends.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    timers: list[threading.Timer] = []
    report_dropped = sys.unraisablehook

    def dropped(unraisable: Any) -> None:
        if unraisable.exc_type is not InterruptedVerb:
            report_dropped(unraisable)
            return
        timers.append(threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), unraisable.exc_value.number)))
        timers[-1].daemon = True
        with suppress(RuntimeError):
            timers[-1].start()

    def interrupt(number: int, frame: Any) -> NoReturn:
        _came.add(number)
        if not timers:
            timers.append(threading.Timer(END_SECONDS, _end, (code, line)))
            timers[0].daemon = True
            with suppress(RuntimeError):  # no memory for a thread
                timers[0].start()
        raise InterruptedVerb(number)

    for number in numbers:
        signal.signal(number, interrupt)
    sys.unraisablehook = dropped
    _forget_in_forks(os.getpid(), interrupt)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)
        _came.clear()
        sys.unraisablehook = report_dropped


def was_interrupted() -> bool:
    """Whether a signal has come inside of ``interrupted_by``.

    An exception that leaves the verb may be another one then: C code that imports a module swallows the interrupt, and
    what is imported next fails.
    """
    return bool(_came)


def _forget_in_forks(process: int, ours: _Handler) -> None:
    """A worker of a job that is told to end would raise out of its loop, with a traceback."""

    def reset() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if os.getppid() == process and signal.getsignal(number) is ours:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=reset)


def _end(code: int, line: str) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"memfit: {line}\n".encode())
    os._exit(code)
