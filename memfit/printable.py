"""Text of others (names of files and modules, messages of a job) as a terminal may show it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves a cursor, changes a terminal's state or the direction of writing, ends a line, or cannot be encoded; tabs
and newlines stay."""


def printable(text: str) -> str:
    """The text with every control character written out: ``\\x1b[2J`` rather than a cleared screen."""
    return _CONTROL.sub(_written_out, text)


class PrintableStream:
    """A text stream on which control characters are written out; carriage returns stay, since progress bars need them.

    Args:
        stream: what is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write("\r".join(map(printable, text.split("\r"))))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_terminal_safe() -> None:
    """From now on, what Python code of this process prints to a terminal has its control characters written out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            setattr(sys, name, PrintableStream(stream))


def one_line(text: str) -> str:
    """Text in one line: where a newline would begin a command, or an entry of a file."""
    return printable(" ".join(text.split()))


def shortened(text: str, most: int = 240) -> str:
    """Text of at most ``most`` characters, of which the last is … where it was longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode()
