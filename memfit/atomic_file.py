"""Files that appear under their name only when they are complete: written to a temporary file, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write_atomic(path: str | Path, content: bytes | str) -> None:
    """Replaces a file with new content: text as UTF-8, names of files that are not UTF-8 in it as their own bytes.

    Raises:
        OSError: it cannot be written; the file that was there before is untouched, and no temporary file is left.
    """
    with open_atomic(path) as file:
        file.write(_encoded(content) if isinstance(content, str) else content)


def _encoded(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half a character, which no file's name holds
        return text.encode(errors="backslashreplace")


@contextlib.contextmanager
def open_atomic(path: str | Path) -> Iterator[IO[bytes]]:
    """A new file to write into, which takes the place of ``path`` when the block ends without an exception.

    The order is what a crash of the machine needs: the content is synced, the file renamed, the folder synced. A
    symbolic link is followed, the mode of an existing file is kept, and a pipe or device is written to directly.
    Until it is renamed, the file's own name is ``temporary_name(path)``.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        with open(target, "wb") as file:
            yield file
        return
    temporary = temporary_name(target)
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        sync(target.parent)


def temporary_name(path: Path) -> Path:
    """A hidden name in the same folder, of this process alone."""
    return path.with_name(f".{path.name[:200]}.{os.getpid()}")


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's names, last over a crash of the machine.

    Raises:
        OSError: it cannot be synced, as on a full disk.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
