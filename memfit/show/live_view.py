"""The live view of a run on standard error: windows and time left, memory against the budget, retries."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from memfit.sizes import format_size
from memfit.train.metrics_file import expected_bytes

_BAR = 24


class LiveView:
    """Drawn anew after every window; what others say while it is there comes above it."""

    def __init__(self, last: int, budget: int, console: Console) -> None:
        """``last``: the number of windows; ``budget`` in bytes."""
        self._console = console
        columns = (TextColumn("training"), BarColumn(_BAR), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, auto_refresh=False)
        self._task = self._progress.add_task("training", total=last)
        self._budget = budget
        self._peak, self._retries, self._skipped = 0, 0, 0
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def line(self, line: dict[str, Any]) -> None:
        """One window is done."""
        self._progress.update(self._task, completed=line["window"] + 1)
        self._peak = max(self._peak, line.get("measured_process_bytes") or 0)
        self._retries += line.get("retries") or 0
        self._skipped += len(line.get("skipped_samples") or ())
        self._live.update(Group(self._progress, self._numbers(line), self._memory(line)), refresh=True)

    def say(self, text: str) -> None:
        """A line that stays, above the view."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the last state on the terminal."""
        self._live.stop()

    def _numbers(self, line: dict[str, Any]) -> RenderableType:
        loss = "unknown" if line.get("loss") is None else f"{line['loss']:.4g}"
        text = Text(f"loss {loss}, {line.get('units_per_second') or 0:.3g} a second")
        if self._retries:
            text.append(f", {self._retries} {'retries' if self._retries > 1 else 'retry'}", style="yellow")
        if self._skipped:
            text.append(f", {self._skipped} skipped", style="yellow")
        return text

    def _memory(self, line: dict[str, Any]) -> RenderableType:
        part = min(self._peak / self._budget, 1.0) if self._budget else 1.0
        filled = round(part * _BAR)
        colour = "green" if part < 0.9 else "yellow" if part < 1 else "red"
        text = Text("memory   ").append("█" * filled, style=colour).append("░" * (_BAR - filled), style="dim")
        text.append(f" {format_size(self._peak)} of {format_size(self._budget)}")
        if planned := expected_bytes(line):
            text.append(f", {format_size(planned)} planned")
        return text
