"""Standard output whose reader may leave: what ``| head`` does not read goes nowhere, and the verb ends as ever."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Leaving(io.FileIO):
    """A pipe's writing end; once nobody reads, the null device."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def readers_may_leave() -> None:
    """Puts such an output in the place of this process's own, where that is a plain file or pipe."""
    own = sys.stdout
    if own is not sys.__stdout__ or not isinstance(own, io.TextIOWrapper) or own.isatty():
        return
    raw = io.BufferedWriter(_Leaving(own.fileno(), "wb", closefd=False))
    sys.stdout = io.TextIOWrapper(raw, encoding=own.encoding, errors=own.errors)
