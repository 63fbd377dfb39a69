"""Shows progress on standard error, if a person looks at it, and sends what a job prints there too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from memfit.garbage import frozen_within
from memfit.library_warnings import without_library_warnings
from memfit.work_stages import is_silent, stages_heard


class _LinesOnce:
    """Standard error that writes each line only once.

    A verb builds a job's nets several times, and libraries repeat their messages each time. Text that does not end in a
    newline, such as a progress bar, passes unchanged.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._written, self._line = stream, set[str](), ""

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click takes a stream that accepts b"" for a binary one, and writes bytes to it
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if is_silent():
            return len(text)
        for part in text.splitlines(keepends=True):
            self._line += part
            if not part.endswith("\n"):
                continue
            line, self._line = self._line, ""
            if line not in self._written or not line.strip():
                self._written.add(line)
                self._stream.write(line)
        if "\r" in self._line:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if is_silent():  # a lock of the stream may be held by a thread that this process does not have
            return
        self._stream.write(self._line)
        self._line = ""
        self._stream.flush()

    def close(self) -> None:
        """Does nothing: a job may close its own streams, and memfit still has to say what it found."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _lines_once() -> Iterator[None]:
    """Context in which libraries repeat no line; warnings and logs that are set up within keep to it afterwards."""
    before = sys.stderr
    once = _LinesOnce(before)
    sys.stderr = once
    try:
        yield
    finally:
        once.flush()
        sys.stderr = before


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Context that shows a spinner and the stage of the work; nothing if standard error is no terminal or ``quiet``.

    Output that is printed within goes to standard error: standard output holds only the answer. Warnings of installed
    libraries are left out. The garbage collector is off: importing torch and a job's libraries takes a sixth longer
    with it, and every trace collects by itself.
    """
    with frozen_within(), without_library_warnings():
        if quiet or not sys.stderr.isatty():
            with _lines_once(), redirect_stdout(sys.stderr):
                yield
            return
        from memfit.printable import printable
        from memfit.show.console import make_console

        with (
            make_console(file=sys.stderr).status(printable(text)) as status, _lines_once(), redirect_stdout(sys.stderr),
            stages_heard(lambda stage: status.update(printable(f"{text}: {stage}"))),
        ):  # fmt: skip
            yield
