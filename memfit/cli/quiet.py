"""Progress on standard error, and only where a person looks at it; and what a job prints goes there too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner while something takes its time; nothing where standard error is no terminal or ``quiet`` is set.

    What is printed inside goes to standard error: standard output is the answer's alone.
    """
    with redirect_stdout(sys.stderr):
        if quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
