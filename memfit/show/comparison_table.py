"""Predictions side by side in the terminal: what each saves against the first, then bytes and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from memfit.show.console import make_console
from memfit.show.footprint_table import phase_name
from memfit.sizes import format_size

if TYPE_CHECKING:
    from memfit.planner.comparison import Subject


def show_comparison(
    subjects: Sequence[Subject], differences: Mapping[str, Sequence[Any]], console: Console | None = None
) -> None:
    """Prints a verdict for each further subject, then a row for each figure."""
    console = console or make_console()
    first = subjects[0]
    for subject in subjects[1:]:
        console.print(verdict_against(subject, first))
    table = Table(box=None, pad_edge=False)
    table.add_column("process bytes", no_wrap=True)
    for subject in subjects:
        table.add_column(subject.name, justify="right")
    for name, cells in _rows(subjects):
        table.add_row(name, *cells)
    console.print()
    console.print(table)
    if differences:
        table = Table(box=None, pad_edge=False, title="\nWhat differs", title_justify="left", title_style="default")
        table.add_column("", no_wrap=True)
        for subject in subjects:
            table.add_column(subject.name, justify="right")
        for name, values in differences.items():
            table.add_row(name, *(f"{value:,}" if isinstance(value, int) else str(value) for value in values))
        console.print(table)
    for line in assumptions_of(subjects):
        console.print(line)


def assumptions_of(subjects: Sequence[Subject]) -> list[str]:
    """A line for each assumption, with the names of the subjects that it was made for where it was not for all."""
    names: dict[str, list[str]] = {}
    for subject in subjects:
        for assumption in subject.prediction.footprint.assumed:
            names.setdefault(assumption, []).append(subject.name)
    return [
        f"Assumed: {assumption}." if len(those) == len(subjects) else f"Assumed for {', '.join(those)}: {assumption}."
        for assumption, those in names.items()
    ]


def verdict_against(subject: Subject, first: Subject) -> str:
    """``s2_v3 lora=16 needs 3.1 GiB less than s2_v3 (7.2 GiB against 10.3 GiB).``"""
    saved = first.process_bytes - subject.process_bytes
    sizes = f"({format_size(subject.process_bytes)} against {format_size(first.process_bytes)})"
    if not saved:
        return f"{subject.name} needs as much as {first.name} {sizes}."
    return (
        f"{subject.name} needs {format_size(abs(saved))} {'less' if saved > 0 else 'more'} than {first.name} {sizes}."
    )


def _rows(subjects: Sequence[Subject]) -> list[tuple[str, list[str]]]:
    """(name, a cell for each subject): every phase's process bytes, and beneath it what is alive at its peak."""
    footprints = [subject.prediction.footprint for subject in subjects]
    rows = [("fits", [footprint.verdict for footprint in footprints])]
    for phase in dict.fromkeys(name for footprint in footprints for name in footprint.phases):
        peaks = [footprint.phases.get(phase) for footprint in footprints]
        rows.append((phase_name(phase), ["-" if peak is None else format_size(peak.process_bytes) for peak in peaks]))
        for category in dict.fromkeys(name for peak in peaks if peak is not None for name in peak.categories):
            sizes = [0 if peak is None else peak.categories.get(category, 0) for peak in peaks]
            if any(sizes):
                rows.append((f"  {category}", [format_size(size) if size else "-" for size in sizes]))
    seconds = [subject.window_seconds for subject in subjects]
    if any(known is not None for known in seconds):
        rows.append(
            (
                "a window",
                [
                    "unknown" if known is None else f"{known:.3g} s" if known >= 1 else f"{1000 * known:.3g} ms"
                    for known in seconds
                ],
            )
        )
    return rows
