"""A run's folder: plan.toml, metrics.jsonl, samples.jsonl, checkpoints/, final/."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memfit.errors import InputError


class RunFolder:
    """Where a run writes. Lines are appended whole; files appear under their name only when they are complete."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def plan(self) -> Path:
        return self.path / "plan.toml"

    @property
    def course(self) -> Path:
        return self.path / "course.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / "last.pt"

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
        """Which windows are trained now: [first, last), for who looks on."""
        replace_file(self.course, json.dumps({"first": first, "last": last}).encode())

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Adds one line to ``name``.jsonl."""
        with open(self.path / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(line, allow_nan=True) + "\n")

    def keep_lines_before(self, window: int) -> None:
        """Drops the lines of windows that a resumed run does again."""
        for name in ("metrics", "samples"):
            path = self.path / f"{name}.jsonl"
            if path.exists():
                lines = [line for line in _whole_lines(path) if line["window"] < window]
                replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file beside its place, syncs it and renames it there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
