"""A sequence of windows in the terminal: allocated and reserved, and where reserved memory grew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from memfit.show.console import make_console
from memfit.sizes import format_size
from memfit.wording import counted

if TYPE_CHECKING:
    from memfit.planner.variable_length.sequence import SequencePrediction


def show_sequence(prediction: SequencePrediction, console: Console | None = None) -> None:
    """One row without and one with expandable segments."""
    console = console or make_console()
    plain = prediction.plain
    ran = counted(plain.windows, "window") if plain.failed_window is None else "the windows"
    table = Table(
        box=None,
        pad_edge=False,
        title=f"\nOver {ran} of {counted(plain.distinct_shapes, 'shape')}",
        title_justify="left",
        title_style="default",
    )
    for title in ("segments", "allocated", "reserved", "ratio", "last growth", "fits"):
        table.add_column(title, justify="left" if title == "segments" else "right")
    for name, peaks in (("as they are", plain), ("expandable", prediction.expandable)):
        table.add_row(
            name,
            format_size(peaks.allocated_bytes),
            format_size(peaks.reserved_bytes),
            f"{peaks.ratio:.2f}",
            f"window {peaks.growth[-1][0]}",
            "yes" if peaks.failed_window is None else f"not window {peaks.failed_window}",
        )
    console.print(table)
