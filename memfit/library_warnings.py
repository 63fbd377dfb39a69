"""Warnings of installed libraries, which are kept out while a job or a script is traced: its own files still warn."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from memfit.errors import is_library


@contextmanager
def without_library_warnings() -> Iterator[None]:
    """Context in which installed libraries show no warnings, and log none.

    A person cannot mend what a library says of itself, such as a name that it deprecates. A warning of the person's own
    files is shown, and so is one that a library blames on them. ``-W`` or ``PYTHONWARNINGS`` shows all of them.
    """
    if sys.warnoptions:
        yield
        return
    shown, handled = warnings.showwarning, logging.Logger.callHandlers

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if not is_library(filename):
            shown(message, category, filename, lineno, file, line)

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno != logging.WARNING or not is_library(record.pathname):
            handled(logger, record)

    warnings.showwarning, logging.Logger.callHandlers = show, handle  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        warnings.showwarning, logging.Logger.callHandlers = shown, handled  # type: ignore[method-assign]
