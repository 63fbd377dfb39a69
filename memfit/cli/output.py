"""Makes standard output and standard error robust: a closed pipe, a full disk, or an encoding that lacks a character.

Output that nobody reads (``| head``) is discarded, and the verb ends as usual. A full disk is a user's mistake,
reported in one line. A character that the encoding lacks is replaced by the nearest ASCII one.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import Any

from memfit.errors import InputError

_PLAIN = {
    "█": "#", "▌": "#", "░": ".", "×": "x", "…": "...", "–": "-", "—": "-", "‑": "-", "→": "->", "≤": "<=", "≥": ">=",
}  # fmt: skip
_HANDLER = "memfit.plain"


class _Pipe(io.FileIO):
    """The writing end of standard output."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            self._to_nowhere()
            return len(data)
        except OSError as error:
            self._to_nowhere()
            seen, write = "standard output", "write it to a disk with room"
            raise InputError(seen, f"cannot be written: {error.strerror}", write) from error

    def _to_nowhere(self) -> None:
        """Redirects further output to the null device, so that the flush at exit cannot fail."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def prepare_output() -> None:
    """Wraps the standard streams of this process if they are plain files or pipes."""
    codecs.register_error(_HANDLER, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape", "backslashreplace"):
            stream.reconfigure(errors=_HANDLER)
    own = sys.stdout
    if own is not sys.__stdout__ or not isinstance(own, io.TextIOWrapper) or own.isatty():
        return
    raw = io.BufferedWriter(_Pipe(own.fileno(), "wb", closefd=False))
    sys.stdout = io.TextIOWrapper(raw, encoding=own.encoding, errors=own.errors)


def complain(text: str) -> None:
    """Writes one line to standard error, which begins with memfit's name once; if nobody can read it, the exit code
    still tells."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"memfit: {text.removeprefix('memfit ')}\n")
        sys.stderr.flush()


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end
