"""A training process attended from outside: its lines kept and shown, what it says passed on; its memory untouched."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO

import click

from memfit.errors import InputError
from memfit.plan import Plan
from memfit.show.follow import Lines, Watcher
from memfit.show.live import LiveView, watched
from memfit.show.scalars import TensorBoard, Wandb, has_tensorboard
from memfit.train.folder import RunFolder

LOOKS_EVERY = 0.1
"""Seconds."""


def keepers(folder: RunFolder, plan: Plan, wandb: bool) -> list[Watcher]:
    """Who keeps a run's scalars: TensorBoard where it is installed, Weights & Biases where it is asked for.

    Raises:
        InputError: ``wandb`` is asked for and not installed.
    """
    found: list[Watcher] = [Wandb(folder.path, asdict(plan))] if wandb else []
    return [*found, TensorBoard(folder.path / "tensorboard")] if has_tensorboard() else found


def attend(
    arguments: Sequence[str], environment: dict[str, str], folder: RunFolder, plan: Plan, kept_by: list[Watcher]
) -> int:
    """Runs a process that trains into ``folder``; gives its exit code, negative where a signal killed it."""
    lines = Lines(folder.path / "metrics.jsonl", behind=_last_window(folder))
    folder.course.unlink(missing_ok=True)
    shown = watched()
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if shown else {"stdout": sys.stderr}
    view: LiveView | None = None
    try:
        with subprocess.Popen(arguments, env=environment, text=True, errors="replace", **output) as child:
            said = _Said(child.stdout) if child.stdout else None
            ended = False
            while not ended:
                try:
                    ended = child.poll() is not None
                    if shown and view is None and folder.course.exists():
                        view = LiveView(json.loads(folder.course.read_text())["last"], plan.budget_bytes)
                    for text in said.new(ended=ended) if said else ():
                        view.say(text) if view else click.echo(text, err=True)
                    for line in lines.new():
                        for watcher in [*kept_by, *([view] if view else [])]:
                            watcher.line(line)
                    if not ended:
                        time.sleep(LOOKS_EVERY)
                except KeyboardInterrupt:
                    continue  # the child was asked too: it saves and ends
            return child.returncode
    finally:
        for watcher in [*kept_by, *([view] if view else [])]:
            watcher.close()


def write_report(folder: RunFolder) -> None:
    """The run's page, where what draws it is installed; a report that cannot be written ends no run."""
    try:
        from memfit.show.page import write_page
        from memfit.show.report import run_report

        write_page(run_report(folder.path), folder.path / "report.html")
    except (ImportError, InputError, OSError) as error:
        click.echo(f"memfit: no report was written: {error}", err=True)


class _Said:
    """What a process prints, line by line, read beside."""

    def __init__(self, pipe: IO[str]) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[str]) -> None:
        for text in pipe:
            self._lines.put(text.rstrip("\n"))

    def new(self, *, ended: bool = False) -> Iterator[str]:
        """Lines that came since the last call; all that are left where the process has ended."""
        if ended:
            self._thread.join(timeout=2)
        while not self._lines.empty():
            yield self._lines.get()


def _last_window(folder: RunFolder) -> int:
    """Of an earlier part of the run; -1 where there is none."""
    return max((line["window"] for line in Lines(folder.path / "metrics.jsonl").new()), default=-1)
