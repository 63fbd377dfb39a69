"""Progress on standard error, and only where a person looks at it; and what a job prints goes there too."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def _without_collector() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()


def settle() -> None:
    """What was imported up to here is no garbage: until ``progress`` ends, collections pass over it.

    A trace collects before it begins; to look through the modules of torch and of a job's libraries takes 0.3 s.
    """
    gc.freeze()


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner while something takes its time; nothing where standard error is no terminal or ``quiet`` is set.

    What is printed inside goes to standard error: standard output is the answer's alone. The garbage collector rests:
    importing torch and what a job needs takes a sixth longer with it, and every trace collects for itself.
    """
    with redirect_stdout(sys.stderr), _without_collector():
        if quiet or not sys.stderr.isatty():
            yield
            return
        from memfit.printable import printable
        from memfit.show.console import make_console

        with make_console(stderr=True).status(printable(text)):
            yield
