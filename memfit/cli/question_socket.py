"""The socket at which a process that has a job loaded is asked for traces.

It listens under a name of its own from the beginning, and is put where questions look for it by the process that
answers: whoever asks next finds it, although the copy may still be setting the job up.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from memfit.planner.hand_over import connected, short_name

_WAITING = 16
"""Connections that wait to be served."""


class QuestionSocket:
    """A socket that listens under this process's own name. Only the same user may connect.

    Args:
        path: where questions look for it.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._own = path, _own_path(path, os.getpid())
        path.parent.mkdir(parents=True, exist_ok=True)
        self._own.unlink(missing_ok=True)
        self.listener, mask = socket.socket(socket.AF_UNIX), os.umask(0o077)
        try:
            with short_name(self._own) as name:
                self.listener.bind(name)
            self.listener.listen(_WAITING)
            self._inode = self._own.lstat().st_ino
        except OSError:
            self.listener.close()
            raise
        finally:
            os.umask(mask)

    @property
    def is_shown(self) -> bool:
        """Whether questions find it: another process may have its own there."""
        with suppress(OSError):
            return self._path.lstat().st_ino == self._inode
        return False

    def close(self) -> None:
        """Ends what waits to be served, and takes the socket away."""
        self.listener.close()
        with suppress(OSError):
            (self._path if self.is_shown else self._own).unlink(missing_ok=True)


def show_socket(path: Path, process: int) -> None:
    """Puts the socket of a process where questions look for it; nothing where another one listens there, or the process
    has none."""
    with suppress(OSError):
        connected(path).close()
        return
    with suppress(OSError):
        os.replace(_own_path(path, process), path)


def _own_path(path: Path, process: int) -> Path:
    return path.with_name(f"{path.stem}.{process}{path.suffix}")
