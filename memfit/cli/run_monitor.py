"""Watches a run from the parent process: stores and shows its lines, and passes on what its processes print."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

import click
from rich.console import Console

from memfit.errors import InputError, describe, mistake_of_leaving
from memfit.interruption import InterruptedVerb
from memfit.plan import Plan
from memfit.show.console import make_console
from memfit.show.live_view import LiveView
from memfit.show.run_follower import Lines, Watcher
from memfit.show.scalars import TensorBoard, Wandb, has_tensorboard
from memfit.train.metrics_file import last_window
from memfit.train.run_folder import RunFolder

LOOKS_EVERY = 0.1
"""Seconds between two looks."""


def keepers(folder: RunFolder, plan: Plan, wandb: bool) -> list[Watcher]:
    """Returns the trackers of a run's scalars: TensorBoard if it is installed, Weights & Biases if it is asked for.

    A tracker that cannot start is reported and left out: a display does not end a run.

    Raises:
        InputError: ``wandb`` is asked for and not installed.
    """
    makers: dict[str, Callable[[], Watcher]] = {}
    if wandb:
        makers["Weights & Biases"] = lambda: Wandb(folder.path, asdict(plan))
    if has_tensorboard():
        makers["TensorBoard"] = lambda: TensorBoard(folder.path / "tensorboard")
    watchers: list[Watcher] = []
    for name, make in makers.items():
        try:
            watchers.append(make())
        except InputError:
            raise
        except Exception as error:
            click.echo(_left_out(name, error), err=True)
    return watchers


def _left_out(name: str, error: Exception) -> str:
    return f"memfit: {name} is switched off: {describe(error)}; the training goes on"


@contextmanager
def attended(folder: RunFolder, plan: Plan, kept_by: list[Watcher]) -> Iterator[None]:
    """Context in which new lines of the run go to the trackers ``kept_by`` and, on a terminal, to a live view."""
    folder.window_range.unlink(missing_ok=True)
    with _terminal() as terminal:
        attendant = _Attendant(folder, plan, kept_by, terminal)
        try:
            yield
        finally:
            attendant.end()


def write_report(folder: RunFolder) -> None:
    """Writes the run's page without curves, if the drawing library is installed; a failure does not end the run."""
    try:
        from memfit.show.page import write_page
        from memfit.show.report import run_report

        write_page(run_report(folder.path, curves=False, ended=True), folder.path / "report.html")
    except InterruptedVerb:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, InputError) else describe(error)
        click.echo(f"memfit: no report was written: {why}", err=True)
    except BaseException as error:
        click.echo(f"memfit: no report was written: {mistake_of_leaving(error)}", err=True)


class _Attendant:
    """Reads a run's lines in a thread of its own.

    The thread also drains what the training processes print. No failure here may end it, or they would block on a full
    pipe.
    """

    def __init__(self, folder: RunFolder, plan: Plan, kept_by: list[Watcher], terminal: tuple[Console, int] | None):
        self._folder, self._plan, self._watchers = folder, plan, list(kept_by)
        self._lines = Lines(folder.lines("metrics"), behind=last_window(folder.lines("metrics")))
        self._terminal = terminal
        self._view: LiveView | None = None
        self._shows = terminal is not None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="memfit-monitor", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Writes what is left."""
        self._ended.set()
        self._thread.join()
        for watcher in self._watchers:
            with self._only_shows(type(watcher).__name__, watcher):
                watcher.close()

    def _attend(self) -> None:
        while not self._ended.wait(LOOKS_EVERY):
            self._look()
        self._look()

    def _look(self) -> None:
        if self._terminal is not None:
            self._draw(*self._terminal)
        try:
            lines = list(self._lines.new())
        except OSError:
            return
        for line in lines:
            for watcher in list(self._watchers):
                with self._only_shows(type(watcher).__name__, watcher):
                    watcher.line(line)

    def _draw(self, console: Console, pipe: int) -> None:
        """Always drains the pipe, and shows its text if the terminal still exists."""
        texts = _available(pipe)
        with self._only_shows("the live view"):
            if self._shows and self._view is None and self._folder.window_range.exists():
                last = json.loads(self._folder.window_range.read_text())["last"]
                self._view = LiveView(last, self._plan.budget_bytes, console)
                self._watchers.append(self._view)
        for text in texts:
            with self._only_shows("the live view", self._view):
                if self._view is not None:
                    self._view.say(text)
                elif self._terminal is not None:
                    console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def _only_shows(self, name: str, watcher: Watcher | None = None) -> Iterator[None]:
        """Context of code that only displays the run: a failure is reported once, and the display is then off."""
        try:
            yield
        except Exception as error:
            if watcher is None or watcher is self._view:
                self._shows = False
            if watcher in self._watchers:
                self._watchers.remove(watcher)
            if watcher is self._view and self._view is not None:
                self._view = None
            with suppress(Exception):
                if self._terminal is not None:
                    self._terminal[0].print(_left_out(name, error), markup=False, soft_wrap=True)
                else:
                    click.echo(_left_out(name, error), err=True)


@contextmanager
def _terminal() -> Iterator[tuple[Console, int] | None]:
    """Context that gives a console on standard error and a pipe that replaces it.

    A live view would overwrite what processes print; with the pipe, the view prints it above itself.
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
    """Returns the lines that are in a pipe now."""
    output = b""
    try:
        while part := os.read(pipe, 1 << 16):
            output += part
    except BlockingIOError:
        pass
    return output.decode(errors="replace").splitlines()
