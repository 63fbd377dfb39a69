"""A run's folder: plan.toml, metrics.jsonl, samples.jsonl, checkpoints/, final/."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memfit.atomic_file import write_atomic
from memfit.errors import InputError
from memfit.plan import Plan


class CannotWriteError(Exception):
    """A run's folder cannot be written; the run stops, and can be resumed."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a ``CannotWriteError`` that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> CannotWriteError:
    why = f"{path} cannot be written: {error.strerror or error}"
    return CannotWriteError(f"{why}; make room there, or make it writable, and go on with --resume")


FLUSH_EVERY = 0.1
"""Seconds for which lines wait at most where windows are shorter. A killed process loses lines of windows that no
checkpoint holds, which the resumed run does again."""


class RunFolder:
    """Where a run writes. Lines are appended whole; files appear under their name only when they are complete."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, int] = {}
        """Open descriptors: lines then cost one write."""
        self._waiting: dict[str, list[dict[str, Any]]] = {}
        self._flushed = -math.inf

    @property
    def plan(self) -> Path:
        return self.path / "plan.toml"

    @property
    def course(self) -> Path:
        return self.path / "course.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, *, resume: bool) -> None:
        """Makes the folder.

        Raises:
            InputError: it is not empty and ``resume`` is not set, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume and any(self.path.iterdir()):
                raise InputError(
                    f"run folder {self.path}", "it is not empty", "write another --out, or --resume to go on with it"
                )
            (self.path / "checkpoints").mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(
                f"run folder {self.path}",
                f"cannot be written: {error.strerror}",
                "write --out as a folder that can be written",
            ) from error

    def write_course(self, first: int, last: int) -> None:
        """Which windows are trained now: [first, last), for who looks on.

        Raises:
            CannotWriteError: it cannot be written.
        """
        with writing(self.course):
            write_atomic(self.course, json.dumps({"first": first, "last": last}))

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Adds one line to ``name``.jsonl; it is in the file after ``flush``, or with a line of ``FLUSH_EVERY`` later.
        Until then it is kept as it is, and must not be changed.

        Raises:
            CannotWriteError: it cannot be written, as on a full disk.
        """
        self._waiting.setdefault(name, []).append(line)
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that wait: before a checkpoint of their windows, and at the end.

        Raises:
            CannotWriteError: they cannot be written, as on a full disk.
        """
        for name in list(self._waiting):
            self._write(name, "".join(json.dumps(line) + "\n" for line in self._waiting.pop(name)).encode())
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes the lines that wait, and closes the files."""
        try:
            self.flush()
        finally:
            for name in list(self._files):
                os.close(self._files.pop(name))

    def _write(self, name: str, whole: bytes) -> None:
        if name not in self._files:
            with writing(self.lines(name)):
                self._files[name] = os.open(self.lines(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(self._files[name], whole)
        except OSError as error:
            raise _cannot_write(self.lines(name), error) from error
        if written != len(whole):
            raise _cannot_write(self.lines(name), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def lines(self, name: str) -> Path:
        """Where the lines of ``metrics`` or ``samples`` are."""
        return self.path / f"{name}.jsonl"

    def keep_lines_before(self, window: int) -> None:
        """Drops the lines of windows that a resumed run does again."""
        for name in ("metrics", "samples"):
            path = self.lines(name)
            if path.exists():
                lines = [line for line in _whole_lines(path) if line["window"] < window]
                with writing(path):
                    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))


SAME = ("job", "settings", "unit", "global_batch", "precision", "seed")
"""What two plans must agree in to train on the same samples in the same windows, and to hold the same state."""


def check_same_samples(before: Plan, now: Plan, where: Path, also: Sequence[str] = ()) -> None:
    """Whether a run may go on under another plan: one that takes the same samples in the same windows.

    Args:
        also: what must agree beside ``SAME``.

    Raises:
        InputError: it takes others; names what differs.
    """
    for name in (*SAME, *also):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            seen = f"--resume with another plan: its {name} is {new!r}"
            raise InputError(seen, f"{where} was run with {old!r}", f"plan with {old!r}, or write another --out")


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
