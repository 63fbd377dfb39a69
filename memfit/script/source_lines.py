"""Finds the line of the user's code that called an operator, and the line of a library, in forward and backward."""

from __future__ import annotations

import bisect
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import memfit
from memfit.script.distributed_files import DistributedFiles
from memfit.script.outcome import Line
from memfit.torch_compat import sequence_number
from memfit.torch_compat.attributes import sequence_number_of

_INTERNAL, _LIBRARY, _OWN = range(3)


class SourceLines:
    """Finds the line of each operator. A backward has no Python frames, so its line is that of the forward's node."""

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {}
        self._lines: dict[tuple[str, int, str, int], Line] = {}
        self._made: dict[int, tuple[list[int], list[Line]]] = {}
        """For each thread: autograd's sequence numbers, and the line that made the nodes from each of them on."""
        self._internal = tuple(str(Path(str(module.__file__)).parent) for module in (torch, memfit))
        names = ("stdlib", "platstdlib", "purelib", "platlib")
        self._installed = (*(sysconfig.get_path(name) for name in names), sys.prefix, sys.base_prefix)
        self._distributed = DistributedFiles()
        self._threads = [threading.get_ident()]

    def kind_of(self, file: str) -> int:
        """Whether a file belongs to torch or memfit, to a library, or to the user."""
        kind = self._kinds.get(file)
        if kind is None:
            if file.startswith(("<", *self._internal)):
                kind = _INTERNAL
            else:
                kind = _LIBRARY if self._is_installed(file) else _OWN
            self._kinds[file] = kind
        return kind

    def _is_installed(self, file: str) -> bool:
        named = "site-packages" in file or "dist-packages" in file
        return named or file.startswith(self._installed) or file in self._distributed

    def is_own(self, file: str) -> bool:
        return self.kind_of(file) == _OWN

    def is_internal(self, file: str) -> bool:
        return self.kind_of(file) == _INTERNAL

    def here(self) -> Line:
        """The line of the code that runs now."""
        frame: FrameType | None = sys._getframe(1)
        library, library_line = "", 0
        kinds = self._kinds
        while frame is not None:
            name = frame.f_code.co_filename
            kind = kinds.get(name)
            if kind is None:
                kind = self.kind_of(name)
            if kind == _OWN:
                return self._line(name, frame.f_lineno, library, library_line)
            if kind == _LIBRARY and not library:
                library, library_line = name, frame.f_lineno
            frame = frame.f_back
        return self._line("", 0, library, library_line)

    def _line(self, *place: Any) -> Line:
        line = self._lines.get(place)
        if line is None:
            file, number, library, library_line = place
            line = Line(file, number, f"{library}:{library_line}" if library else "")
            self._lines[place] = line
        return line

    def note(self) -> Line:
        """The line of an operator in a forward, kept for the node that it makes."""
        line = self.here()
        thread = threading.get_ident()
        made = self._made.get(thread)
        if made is None:
            made = self._made[thread] = ([], [])
        numbers, lines = made
        number = sequence_number()
        if not numbers or (number != numbers[-1] and line is not lines[-1]):
            numbers.append(number)
            lines.append(line)
        return line

    def of_node(self, node: Any) -> Line:
        """The line of an operator in a backward."""
        line = self.here()
        if line.file:
            return line
        numbers, lines = self._made.get(self._threads[-1], ([], []))
        at = bisect.bisect_right(numbers, sequence_number_of(node) + 1) - 1
        return lines[at] if at >= 0 else line

    def enter_backward(self) -> None:
        """Notes that the nodes of the backward that starts now were made in this thread."""
        self._threads.append(threading.get_ident())

    def leave_backward(self) -> None:
        self._threads.pop()


def own_frames(lines: SourceLines) -> list[FrameType]:
    """Yields the frames of the user's own code on the stack, innermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if lines.is_own(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames
