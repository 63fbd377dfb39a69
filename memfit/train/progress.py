"""A live line on standard error while a run goes on, where a person looks at it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from memfit.plan import Plan
from memfit.sizes import format_size


class Progress:
    """Windows done, loss, and memory against the budget."""

    def __init__(self, first: int, last: int, plan: Plan) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), auto_refresh=False)
        self._task = self._bar.add_task("training", total=last, completed=first)
        self._budget = plan.budget_bytes

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def line(self, line: dict[str, Any]) -> None:
        """One window is done."""
        memory = f"{format_size(line['measured_process_bytes'])} of {format_size(self._budget)}"
        self._bar.update(self._task, completed=line["window"] + 1, description=f"loss {line['loss']:.4f}  {memory}")
        self._bar.refresh()
