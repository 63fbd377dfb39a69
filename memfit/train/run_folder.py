"""A run's folder: plan.toml, metrics.jsonl, samples.jsonl, checkpoints/, final/."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memfit.atomic_file import open_atomic, write_atomic
from memfit.errors import InputError, unwritable
from memfit.job_path import absolute_job
from memfit.plan import Plan
from memfit.train import line_parts
from memfit.train.append_file import AppendFile
from memfit.train.line_parts import parts_of
from memfit.train.metrics_file import (
    describe_windows,
    format_line,
    kept_before,
    last_window,
    line_of_window,
    missing_windows,
    parse_line,
    window_range,
)
from memfit.train.run_files import check_run_files
from memfit.wording import counted


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
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return _gone(path.parent)
    why = f"{path} cannot be written: {error.strerror or error}"
    write = "make room there, or make it writable"
    if isinstance(error, IsADirectoryError | FileExistsError):
        write = "remove what is there"
    return CannotWriteError(f"{why}; {write}, and go on with --resume")


def _gone(folder: Path) -> CannotWriteError:
    seen = f"the folder {folder} was removed, moved or replaced while the run was writing to it"
    return CannotWriteError(f"{seen}; write another --out, or go on with --resume where the folder is now")


WAITS = 0.2
"""Seconds that lines of windows wait at most to be written together."""
Lines = Iterable[tuple[str, dict[str, Any]]]
"""Lines, each with the name of its file."""
MARK = ".memfit-run"
"""A file that every run's folder has, so that no other folder is taken for one."""


class RunFolder:
    """Where a run writes. Lines are appended whole; files appear under their name only when they are complete."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, AppendFile] = {}
        """Open descriptors: lines then cost one write."""
        self._sizes: dict[str, int] = {}
        """Bytes in each."""
        self._made = False
        """Whether the folder was not there before."""
        self._waiting: deque[Callable[[], Lines]] = deque()
        self._written_at = -math.inf
        self._failure: CannotWriteError | None = None
        """Why another thread could not write what waited."""
        self._writing = threading.RLock()
        self._identity: tuple[int, int] | None = None
        """Of the folder at the first line."""
        self._marked = False
        """Whether ``MARK`` was in it then."""

    @property
    def plan(self) -> Path:
        return self.path / "plan.toml"

    @property
    def window_range(self) -> Path:
        return self.path / "window_range.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stacks(self) -> Path:
        """The stacks of a run that made no progress, a file for each rank."""
        return self.path / "stacks"

    def make(self, *, resume: bool) -> None:
        """Makes the folder where it is not there, and touches nothing in it: another run may hold it.

        Raises:
            InputError: it is not empty and ``resume`` is not set, it is no run's folder, it cannot be made, or what is
                in it is not as a run leaves it.
        """
        try:
            self._made |= not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            filled = any(self.path.iterdir())
        except OSError as error:
            raise self._unwritable(error) from error
        if filled and not resume:
            raise InputError(
                f"run folder {self.path}", "it is not empty", "write another --out, or --resume to go on with it"
            )
        if filled and not self._is_run():
            raise InputError(
                f"run folder {self.path}",
                "it is not empty, and no run has written into it",
                "write --out as the folder of the run to go on with, or as a new one",
            )
        if filled:
            check_run_files(self.path)

    def open(self, *, resume: bool) -> None:
        """Makes the folder and what every run has in it; the caller holds the folder.

        Raises:
            InputError: see ``make``, or it cannot be written.
        """
        self.make(resume=resume)
        try:
            (self.path / MARK).touch()
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            if not resume:
                self.take_back()
            raise self._unwritable(error) from error

    def take_back(self) -> None:
        """Removes what ``open`` made, where nothing else is in it, so that the next launch needs no ``--resume``."""
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                self.checkpoints.rmdir()
            (self.path / MARK).unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()

    def _unwritable(self, error: OSError) -> InputError:
        return unwritable(f"run folder {self.path}", error)

    def _is_run(self) -> bool:
        files = (MARK, "samples.jsonl", "metrics.jsonl")
        return any((self.path / name).is_file() for name in files) or any(self.checkpoints.glob("[0-9]*/manifest.json"))

    def write_window_range(self, first: int, last: int) -> None:
        """Writes which windows this launch trains, [first, last), for the live view.

        Raises:
            CannotWriteError: it cannot be written.
        """
        with writing(self.window_range):
            write_atomic(self.window_range, json.dumps({"first": first, "last": last}))

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Writes one line at the end of ``name``.jsonl, after those that wait.

        Raises:
            CannotWriteError: it cannot be written, as on a full disk.
        """
        with self._writing:
            self.write_waiting()
            self._append([(name, line)])

    def append_soon(self, make: Callable[[], Lines]) -> None:
        """Writes the lines that ``make`` gives: at once, where the last ones were written ``WAITS`` seconds ago or
        longer; else together with those that follow.

        Between two steps of a small net code is slow, since caches hold other code: lines that are made and written
        together take a third of the time. ``write_waiting`` writes what still waits; another thread may call it.

        Raises:
            CannotWriteError: they, or lines that waited, cannot be written.
        """
        self._waiting.append(make)
        if time.monotonic() - self._written_at >= WAITS or self._failure is not None:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Writes all lines that wait, in their order.

        Raises:
            CannotWriteError: they cannot be written. Each later call raises it too.
        """
        with self._writing:
            if self._failure is not None:
                raise self._failure
            count = len(self._waiting)
            if not count:
                return
            lines = [line for number in range(count) for line in self._waiting[number]()]
            try:
                self._append(lines)
            except CannotWriteError as error:
                self._failure = error
                raise
            for _ in range(count):
                self._waiting.popleft()
            self._written_at = time.monotonic()

    def _append(self, lines: Lines) -> None:
        """Writes lines of whole windows: those of a file at once.

        Raises:
            CannotWriteError: they cannot be written, or the folder is gone.
        """
        self._check_is_there()
        texts: dict[str, list[bytes]] = {}
        for name, line in lines:
            if name not in texts and self._sizes.get(name, 0) >= line_parts.PART_BYTES and line.get("rank", 0) == 0:
                self._begin_part(name)
            texts.setdefault(name, []).append(format_line(line))
        for name, of_file in texts.items():
            self._write(name, b"".join(of_file))

    def _check_is_there(self) -> None:
        """Refuses a folder that is not the one of the first line: what is open in it would be written in vain."""
        try:
            status = os.stat(self.path)
            if self._identity is None:
                self._identity, self._marked = (status.st_dev, status.st_ino), (self.path / MARK).exists()
            if self._marked:
                os.stat(self.path / MARK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _gone(self.path) from error
        except OSError:
            return
        if (status.st_dev, status.st_ino) != self._identity:
            raise _gone(self.path)

    def close(self) -> None:
        """Writes what waits, and closes the files.

        Raises:
            CannotWriteError: what waits cannot be written.
        """
        try:
            self.write_waiting()
        finally:
            for name in list(self._files):
                self._files.pop(name).close()

    def _write(self, name: str, content: bytes) -> None:
        if name not in self._files:
            with writing(self.lines(name)):
                self._files[name] = AppendFile(self.lines(name))
                self._sizes[name] = self.lines(name).stat().st_size
        try:
            written = self._files[name].write(content)
        except OSError as error:
            raise _cannot_write(self.lines(name), error) from error
        if written != len(content):
            raise _cannot_write(self.lines(name), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        self._sizes[name] += written

    def _begin_part(self, name: str) -> None:
        """Compresses the file's lines into a part. Where that cannot be written, the file grows on, and it is tried
        again when it has grown by as much."""
        path = self.lines(name)
        self._sizes[name] = 0
        with contextlib.suppress(OSError):
            line_parts.compress(path, *window_range(path))
            self._files.pop(name).close()

    def lines(self, name: str) -> Path:
        """Where the lines of ``metrics`` or ``samples`` are."""
        return self.path / f"{name}.jsonl"

    def keep_lines_before(self, window: int) -> list[str]:
        """Keeps the whole lines of windows before this one, and drops those of windows that a resumed run does again.

        Returns:
            What is lost, a sentence for each file in which something is.

        Raises:
            CannotWriteError: a file cannot be written.
        """
        lost: list[str] = []
        for name in ("metrics", "samples"):
            path = self.lines(name)
            if missing := missing_windows(self._rewrite(path, window)):
                lost.append(
                    f"{path.name} has lost the lines of {counted(len(missing), 'window')} "
                    f"({describe_windows(missing)}); the checkpoint holds what was learned from them"
                )
        return lost

    @staticmethod
    def _rewrite(path: Path, window: int, instead: dict[str, Any] | None = None) -> bytearray:
        """Leaves the lines before a window in a file and its parts; gives a byte for each window, 1 where it has one.

        Lines of a part that holds others too go back into the file, whose lines are never all in memory.

        Args:
            instead: a line that takes the place of its window's.
        """
        present, parts = bytearray(window), parts_of(path)
        if not path.exists() and not parts:
            return present
        whole = [part for part in parts if part.last < (window if instead is None else instead["window"])]
        covered = max((part.last for part in whole), default=-1)
        with writing(path):
            with open_atomic(path) as file:
                for text in kept_before(path, window):
                    line = parse_line(text)
                    assert line is not None
                    present[line["window"]] = 1
                    if instead is not None and line["window"] == instead["window"]:
                        text = format_line(instead)
                    if line["window"] > covered:
                        file.write(text)
            for part in parts[len(whole) :]:
                part.path.unlink(missing_ok=True)
        return present

    def metrics_of(self, window: int) -> dict[str, Any] | None:
        """The line of metrics of a window; None where there is none."""
        return line_of_window(self.lines("metrics"), window)

    def replace_metrics(self, line: dict[str, Any]) -> None:
        """Writes a window's line of metrics anew.

        Raises:
            CannotWriteError: the file cannot be written.
        """
        path = self.lines("metrics")
        self._rewrite(path, last_window(path) + 1, line)


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
        if old != new and not (name == "job" and _same_file(before, now)):
            seen = f"--resume with another plan: its {name} is {new!r}"
            raise InputError(seen, f"{where} was run with {old!r}", f"plan with {old!r}, or write another --out")


def _same_file(before: Plan, now: Plan) -> bool:
    """Whether the paths of two plans' jobs are those of one class, written from other folders."""
    return absolute_job(before.job, before.job_folder) == absolute_job(now.job, now.job_folder)
