"""The largest size that fits in the terminal: the best answer first, then a row for each card and policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from memfit.show.console import make_console
from memfit.show.footprint_table import assumptions, of_sizes, phase_name, short_name
from memfit.sizes import format_size

if TYPE_CHECKING:
    from memfit.planner.largest import Largest


CERTAIN = (
    "The largest size may not fit, since its interval reaches beyond the memory. "
    "Up to the certain size, the whole interval fits."
)


def show_largest(answers: Sequence[Largest], what: str, unit: str, console: Console | None = None) -> None:
    """Prints the verdict for each card, and all policies.

    Args:
        what: what the sizes are of: micro_batch, length, or a setting.
        unit: what the job counts.
    """
    console = console or make_console()
    for key in dict.fromkeys(answer.device.key for answer in answers):
        console.print(largest_line([answer for answer in answers if answer.device.key == key], what, unit))
    if any(answer.certain != answer.size for answer in answers):
        console.print(CERTAIN, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("device", "policy", "largest", "certain", "shape", "process", "phase"):
        table.add_column(name, justify="right" if name in ("largest", "certain", "process") else "left")
    for answer in answers:
        if answer.prediction is None:
            table.add_row(answer.device.key, answer.policy.name, "none", "none", "", "", "")
            continue
        footprint = answer.prediction.footprint
        need = max(phase.process_bytes for phase in footprint.phases.values())
        table.add_row(
            answer.device.key, answer.policy.name,
            largest_in_words(size_in_unit(answer, what), may_be_larger=answer.may_be_larger),
            "none" if answer.certain is None else f"{size_in_unit(answer, what, answer.certain):,}",
            str(answer.prediction.shape), of_sizes(need, answer.device.usable_bytes or 0),
            phase_name(footprint.limiting_phase),
        )  # fmt: skip
    console.print()
    console.print(table)
    for line in dict.fromkeys(line for answer in answers for line in refusal_lines(answer, what)):
        console.print(line, soft_wrap=True)
    footprints = [answer.prediction.footprint for answer in answers if answer.prediction is not None]
    for line in dict.fromkeys(line for footprint in footprints for line in assumptions(footprint)):
        console.print(line, soft_wrap=True)


def largest_line(answers: Sequence[Largest], what: str, unit: str) -> str:
    """``RTX 4090: micro-batch 5,632 frames keeping everything, 20,480 with recomputing.``"""
    device = answers[0].device
    sizes = {
        answer.policy.name: largest_in_words(size_in_unit(answer, what), may_be_larger=answer.may_be_larger)
        for answer in answers
        if answer.size is not None
    }
    if not sizes:
        smallest = size_in_words(min(answer.search.smallest or 1 for answer in answers), what)
        return f"{short_name(device)}: nothing fits in {format_size(device.usable_bytes or 0)}, not even {smallest}."
    words = ", ".join(f"{size} ({name})" for name, size in sizes.items())
    name = {"micro_batch": f"largest micro-batch in {unit}", "length": "longest sequence"}.get(what, f"largest {what}")
    return f"{short_name(device)}: {name} {words}."


def largest_in_words(size: int, *, may_be_larger: bool) -> str:
    """``2,176``, or ``2,176 or more`` where larger sizes may fit."""
    return f"{size:,}{' or more' if may_be_larger else ''}"


def refusal_lines(answer: Largest, what: str) -> list[str]:
    """What the job refuses, and where the search stopped, as far as an answer depends on it."""
    search, lines = answer.search, []
    if search.stepped is not None:
        refused = f"The job refuses {size_in_words(search.stepped.size, what)} ({search.stepped.reason})"
        lines.append(f"{refused}: only multiples of {search.step} were tried from there on.")
    if search.ended is not None and search.stopped:
        lines.append(
            f"The search stopped at {size_in_words(search.ended.size, what)}, whose trace is too long "
            f"({search.ended.reason}): larger sizes than the answer may fit."
        )
    elif search.ended is not None:
        refused = f"the job refuses {size_in_words(search.ended.size, what)} ({search.ended.reason})"
        lines.append(f"Memory is not the limit: {refused}.")
    return lines


def size_in_words(size: int, what: str) -> str:
    """``3 items``, ``length 1,025``, ``layers 12``."""
    return f"{size:,} item{'' if size == 1 else 's'}" if what == "micro_batch" else f"{what} {size:,}"


def size_in_unit(answer: Largest, what: str, size: int | None = None) -> int:
    """A size in the job's unit; None: the largest that fits."""
    assert answer.size is not None
    assert answer.prediction is not None
    each = answer.prediction.micro_batch // answer.size if what == "micro_batch" else 1
    return (answer.size if size is None else size) * each
