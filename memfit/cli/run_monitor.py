"""A run attended from outside: its lines kept and shown, what its processes say passed on, their memory untouched."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click
from rich.console import Console

from memfit.errors import InputError
from memfit.plan import Plan
from memfit.show.console import make_console
from memfit.show.live_view import LiveView
from memfit.show.run_follower import Lines, Watcher
from memfit.show.scalars import TensorBoard, Wandb, has_tensorboard
from memfit.train.run_folder import RunFolder

LOOKS_EVERY = 0.1
"""Seconds."""


def keepers(folder: RunFolder, plan: Plan, wandb: bool) -> list[Watcher]:
    """Who keeps a run's scalars: TensorBoard where it is installed, Weights & Biases where it is asked for.

    Raises:
        InputError: ``wandb`` is asked for and not installed.
    """
    found: list[Watcher] = [Wandb(folder.path, asdict(plan))] if wandb else []
    return [*found, TensorBoard(folder.path / "tensorboard")] if has_tensorboard() else found


@contextmanager
def attended(folder: RunFolder, plan: Plan, kept_by: list[Watcher]) -> Iterator[None]:
    """While this is open, new lines of the run go to ``kept_by`` and, on a terminal, to a live view."""
    folder.course.unlink(missing_ok=True)
    with _terminal() as terminal:
        attendant = _Attendant(folder, plan, kept_by, terminal)
        try:
            yield
        finally:
            attendant.end()


def write_report(folder: RunFolder) -> None:
    """The run's page without curves, where what draws it is installed; one that cannot be written ends no run."""
    try:
        from memfit.show.page import write_page
        from memfit.show.report import run_report

        write_page(run_report(folder.path, curves=False), folder.path / "report.html")
    except (ImportError, InputError, OSError) as error:
        click.echo(f"memfit: no report was written: {error}", err=True)


class _Attendant:
    """Looks at a run's lines in a thread of its own."""

    def __init__(self, folder: RunFolder, plan: Plan, kept_by: list[Watcher], terminal: tuple[Console, int] | None):
        self._folder, self._plan, self._watchers = folder, plan, list(kept_by)
        self._lines = Lines(folder.lines("metrics"), behind=_last_window(folder))
        self._terminal = terminal
        self._view: LiveView | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Gives what is left."""
        self._ended.set()
        self._thread.join()
        for watcher in self._watchers:
            watcher.close()

    def _attend(self) -> None:
        while not self._ended.wait(LOOKS_EVERY):
            self._look()
        self._look()

    def _look(self) -> None:
        if self._terminal is not None:
            console, said = self._terminal
            if self._view is None and self._folder.course.exists():
                last = json.loads(self._folder.course.read_text())["last"]
                self._view = LiveView(last, self._plan.budget_bytes, console)
                self._watchers.append(self._view)
            for text in _available(said):
                (self._view.say if self._view else lambda line: console.print(line, markup=False, soft_wrap=True))(text)
        for line in self._lines.new():
            for watcher in self._watchers:
                watcher.line(line)


@contextmanager
def _terminal() -> Iterator[tuple[Console, int] | None]:
    """Where a person looks at standard error: a console there, and a pipe that takes its place until this is closed.

    What processes write into the pipe would be drawn over by a live view; the view prints it above itself.
    """
    if not sys.stderr.isatty():
        yield None
        return
    sys.stderr.flush()
    kept = os.dup(2)
    said, pipe = os.pipe()
    os.set_blocking(said, False)
    os.dup2(pipe, 2)
    os.close(pipe)
    try:
        with io.TextIOWrapper(io.FileIO(os.dup(kept), "w"), write_through=True) as screen:
            yield make_console(file=screen, force_terminal=True), said
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        for descriptor in (kept, said):
            os.close(descriptor)


def _available(pipe: int) -> list[str]:
    """Lines that are in a pipe now."""
    found = b""
    try:
        while part := os.read(pipe, 1 << 16):
            found += part
    except BlockingIOError:
        pass
    return found.decode(errors="replace").splitlines()


def _last_window(folder: RunFolder) -> int:
    """Of an earlier part of the run; -1 where there is none."""
    return max((line["window"] for line in Lines(folder.lines("metrics")).new()), default=-1)
