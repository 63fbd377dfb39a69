"""A small file system of its own, that fills, has no inodes left, or can only be read: for tests and attacks."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class CannotMountError(Exception):
    """No file system can be mounted here: what was to be done to it was not done."""


class Disk:
    """A small file system of its own, if ``mounted``; else a plain folder, which must not be spoiled."""

    def __init__(self, path: Path, mounted: bool) -> None:
        self._path, self.mounted = path, mounted
        self._ballast = path / "ballast"

    def spoil(self, how: str) -> None:
        """Fills it, takes its inodes, or makes it read-only."""
        if how == "read-only disk":
            self._remount("ro")
        elif how == "no inodes":
            self._remount("nr_inodes=1")
            with contextlib.suppress(OSError):
                self._ballast.mkdir(exist_ok=True)
                for number in range(100_000):
                    (self._ballast / str(number)).touch()
        else:
            with contextlib.suppress(OSError), open(self._ballast, "wb") as file:
                while True:
                    file.write(b"0" * 4096)
                    file.flush()

    def restore(self) -> None:
        """As it was before, with what was written into it."""
        if not self.mounted:
            return
        self._remount("rw")
        if self._ballast.is_dir():
            shutil.rmtree(self._ballast)
        self._ballast.unlink(missing_ok=True)

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self._path)], check=False, capture_output=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str = "24m") -> Iterator[Disk]:
    """Mounts a small file system on a folder, and takes it away at the end."""
    path.mkdir(parents=True)
    options = ["-o", f"size={size},nr_inodes=2000"]
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(path)], capture_output=True, check=False)
    try:
        yield Disk(path, made.returncode == 0)
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(path)], check=False)
