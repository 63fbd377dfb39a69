"""A run seen while it goes on: the lines that its processes add to metrics.jsonl, given to who shows or keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from memfit.train.line_parts import parts_of
from memfit.train.metrics_file import parse_line


class Watcher(Protocol):
    """Who wants a run's lines."""

    def line(self, line: dict[str, Any]) -> None:
        """One window is done."""

    def close(self) -> None:
        """The run has ended."""


class Lines:
    """The whole lines that are new in a file of JSON lines.

    A resumed run replaces the file and does some windows again: lines of windows that were given before the file was
    replaced come again, those still in it do not. A long run begins the file anew: what was not given yet is in a part.
    """

    def __init__(self, path: Path, *, behind: int = -1) -> None:
        """``behind``: lines of windows up to this one are not given."""
        self._path, self._behind = path, behind
        self._offset, self._file = 0, -1

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the lines that came since the last call."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except OSError:
            return
        with file:
            inode = self._path.stat().st_ino
            if inode != self._file:
                self._file, self._offset = inode, 0
                for part in parts_of(self._path):
                    if part.last > self._behind:
                        yield from filter(None, map(self._next, part.lines()))
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    return
                self._offset += len(text)
                line = self._next(text)
                if line is not None:
                    yield line

    def _next(self, text: bytes) -> dict[str, Any] | None:
        """A line that was not given yet."""
        line = parse_line(text)
        if line is None or line["window"] <= self._behind:
            return None
        self._behind = line["window"]
        return line
