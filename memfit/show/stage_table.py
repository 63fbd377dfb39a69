"""The stages of a pipeline in the terminal: their modules, and what each is predicted to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from memfit.printable import printable
from memfit.sizes import format_size


def stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each stage.

    Args:
        stages: with the values of ``StageFigures``. Seconds are of one micro-batch; bytes are those of the rank that
            holds the stage, and are absent or None where it was not traced.
    """
    title = "\nStages of the pipeline (seconds of one micro-batch)"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="default")
    for name in ("stage", "modules", "number", "forward", "backward", "process"):
        table.add_column(name, justify="left" if name == "modules" else "right")
    for number, stage in enumerate(stages):
        first, last, nbytes = stage["first_module"], stage["last_module"], stage.get("process_bytes")
        table.add_row(
            str(number), printable(first if first == last else f"{first} to {last}"), str(stage["modules"]),
            f"{stage['forward_seconds']:.2g} s", f"{stage['backward_seconds']:.2g} s",
            format_size(nbytes) if nbytes is not None else "not traced",
        )  # fmt: skip
    return table
