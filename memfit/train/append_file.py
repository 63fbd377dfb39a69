"""AppendFile: lines are added to a file, whatever the job does to descriptors that it did not open."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

FIRST = 3
"""Descriptors below are those of the standard streams: what code in C prints would end up in the file."""


class AppendFile:
    """A file that is open for appending.

    A job may close its descriptor (``os.closerange``), and the system then gives the number to another file; a person
    may remove or replace the file. So both are compared before each use, and the file is opened again where the
    descriptor or the path stands for another.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, and makes it if it is not there.

        Raises:
            OSError: it cannot be opened.
        """
        self._path = path
        self._open()

    def write(self, content: bytes) -> int:
        """Adds bytes at the end; gives how many were written.

        Raises:
            OSError: they cannot be written.
        """
        if not self._is_open():
            self._open()
        elif not self._is_in_place():
            os.close(self._descriptor)
            self._open()
        return os.write(self._descriptor, content)

    def close(self) -> None:
        """Closes the file, unless the descriptor is another's by now."""
        if self._is_open():
            os.close(self._descriptor)

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self._descriptor < FIRST:
            low, self._descriptor = self._descriptor, fcntl.fcntl(self._descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST)
            os.close(low)
        self._identity = identity(self._descriptor)

    def _is_open(self) -> bool:
        return identity(self._descriptor) == self._identity

    def _is_in_place(self) -> bool:
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return (status.st_dev, status.st_ino) == self._identity


def identity(descriptor: int) -> tuple[int, int] | None:
    """Device and inode of what a descriptor stands for; None where it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
