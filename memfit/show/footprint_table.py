"""Tables for the terminal: the verdict first, then why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.show.console import make_console
from memfit.sizes import format_size

if TYPE_CHECKING:
    from memfit.footprint import Footprint
    from memfit.planner.predict import Prediction

_VERDICTS = {
    "yes": ("Fits", "green"),
    "close": ("Close to the limit", "yellow"),
    "no": ("Does not fit", "red"),
}
_BAR = 24
_PLACES = 3
"""Assumptions that are told one by one."""


def show_prediction(prediction: Prediction, console: Console | None = None) -> None:
    """Verdict, peaks by phase, and what is alive at the highest of them."""
    console = console or make_console()
    found = prediction.footprint
    device = prediction.device
    console.print(headline(prediction))
    console.print(
        f"{prediction.job}, {prediction.micro_batch} {prediction.unit} ({prediction.shape}) on {device.name}, "
        f"{format_size(device.usable_bytes or 0)} usable",
        style="dim",
    )
    if prediction.world > 1:
        console.print(f"rank {prediction.rank} of {prediction.world} on {prediction.engine}", style="dim")
    console.print()
    console.print(_phases(found, cuda=device.is_cuda))
    console.print(_categories(found))
    worst = found.phases[found.limiting_phase]
    console.print(
        f"Peak in {worst.at.module or 'the step'} ({worst.at.operator}); "
        f"largest request {format_size(worst.largest_request.bytes)} "
        f"in {worst.largest_request.module or 'the step'}.",
        soft_wrap=False,
    )
    for line in remarks(found):
        console.print(line, style="dim")


def remarks(found: Footprint) -> list[str]:
    """What the interval rests on, where that is little, and what a reading of the card may show beside the need."""
    lines = []
    if found.measured_runs == 0:
        kind = found.net_kind or "unknown"
        lines.append(f"A net of this kind ({kind}) was never measured: the interval is the widest of those that were.")
    if found.plan_searches:
        lines.append(
            f"cudnn.benchmark tries plans {found.plan_searches} times in the first step: a reading of the card may "
            "rise for a moment, up to all of it. That is not needed, and no run fails of it."
        )
    return lines + assumptions(found)


def assumptions(found: Footprint) -> list[str]:
    """What was taken for sizes that depend on data."""
    lines = [f"Assumed: {line}." for line in found.assumed[:_PLACES]]
    if len(found.assumed) > _PLACES:
        lines.append(f"Assumed at {len(found.assumed) - _PLACES} places more: --json lists them.")
    return lines


def headline(prediction: Prediction) -> Text:
    """The verdict in one line."""
    found = prediction.footprint
    word, colour = _VERDICTS[found.verdict]
    text = Text(word, style=f"bold {colour}")
    if found.failed_request:
        request = found.failed_request
        text.append(
            f": {request.phase} asks for {format_size(request.bytes)} "
            f"in {request.module or 'the step'} that are not there.",
            style="default",
        )
    else:
        text.append(
            f": {format_size(found.headroom_bytes)} to spare in {found.limiting_phase}, which needs most.",
            style="default",
        )
    return text


def _phases(found: Footprint, *, cuda: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("phase")
    for name in ("allocated", "reserved", "process", "interval") if cuda else ("allocated",):
        table.add_column(name, justify="right")
    for name, phase in found.phases.items():
        cells = [format_size(phase.allocated_bytes)]
        if cuda:
            low, high = format_size(phase.process_bytes_low), format_size(phase.process_bytes_high)
            cells += [format_size(phase.reserved_bytes), format_size(phase.process_bytes), f"{low} to {high}"]
        table.add_row(name, *cells)
    return table


def _categories(found: Footprint) -> Table:
    worst = found.phases[found.limiting_phase]
    total = max(sum(worst.categories.values()), 1)
    table = Table(
        box=None,
        pad_edge=False,
        title=f"\nAlive at the peak of {found.limiting_phase}",
        title_justify="left",
        title_style="default",
    )
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("share")
    for name, nbytes in sorted(worst.categories.items(), key=lambda pair: -pair[1]):
        if nbytes:
            table.add_row(
                name, format_size(nbytes), "█" * max(round(nbytes / total * _BAR), 1) + f" {nbytes / total:.0%}"
            )
    return table
