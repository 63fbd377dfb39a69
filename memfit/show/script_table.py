"""What ``memfit trace`` prints: the verdict, the phases, the lines that hold the peak, the cards, and what to write."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.script.batch_scan import BatchScan
from memfit.script.outcome import MOVE_TO_CARD, NOTHING_ON_CARD, TRAINS_ON_CPU, LineUse, ScriptOutcome, TraceRequest
from memfit.script.request_device import requested_device
from memfit.show.console import make_console
from memfit.show.footprint_table import coloured_verdict, largest_process, phase_name, phase_table, run_needs_more
from memfit.sizes import format_size
from memfit.wording import counted

_TOP_LINES = 8
_TOP_OTHERS = 6
_CODE = 60
"""Characters of a line's code."""
_CARD_WORDS = {"yes": ("fits", "green"), "close": ("close", "yellow"), "no": ("does not fit", "red")}


def show_outcome(
    request: TraceRequest, outcome: ScriptOutcome, scan: BatchScan | None, console: Console | None = None
) -> None:
    """Prints the answer."""
    console = console or make_console()
    if outcome.error is not None and not outcome.error.out_of_memory:
        _show_error(outcome)
    console.print(script_headline(request, outcome), soft_wrap=True)
    footprint = outcome.footprint
    if footprint is None:
        return
    console.print(
        f"{counted(outcome.windows, 'complete step')}; stopped after {outcome.ended}; "
        f"{outcome.processor_seconds:.0f} s of processor time",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    console.print()
    console.print(phase_table(footprint, cuda=request.device != "cpu"))
    console.print(_lines(outcome))
    if scan is not None:
        console.print(f"\n{largest_batch(scan)}", soft_wrap=True)
    if outcome.options:
        console.print(_options(outcome))
    if outcome.cards:
        console.print(_cards(outcome))
    for line in script_remarks(outcome):
        console.print(Text(line, style="dim"), soft_wrap=True)


def show_devices(requests: Sequence[TraceRequest], outcomes: Sequence[ScriptOutcome]) -> None:
    """One row for each card that was asked about."""
    console = make_console()
    table = Table(box=None, pad_edge=False)
    table.add_column("card")
    for name in ("usable", "needs"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for request, outcome in zip(requests, outcomes, strict=True):
        device, footprint = requested_device(request), outcome.footprint
        usable = "unknown" if device.usable_bytes is None else format_size(device.usable_bytes)
        if footprint is None or outcome.windows < 2:
            table.add_row(request.device, usable, "unknown", "no verdict")
            continue
        word, colour = _CARD_WORDS[footprint.verdict]
        most = largest_process(footprint).process_bytes
        table.add_row(request.device, usable, format_size(most), Text(word, style=colour))
    console.print(table)
    console.print(f"\nDetails on {requests[0].device}:", soft_wrap=True)


def script_headline(request: TraceRequest, outcome: ScriptOutcome) -> Text:
    """The verdict in one line."""
    footprint = outcome.footprint
    if outcome.error is not None and outcome.error.out_of_memory:
        text = Text("Does not fit", style="bold red")
        return text.append(f" in {format_size(request.memory_bytes or 0)}: {outcome.error.summary}", style="default")
    if footprint is None or outcome.windows < 2:
        text = Text("No verdict", style="bold yellow")
        why = f"{counted(outcome.windows, 'complete optimizer step')} ran, and two are needed"
        if NOTHING_ON_CARD in outcome.not_seen:
            return text.append(f": {TRAINS_ON_CPU}; {MOVE_TO_CARD}.", style="default")
        reason = outcome.error.summary if outcome.error is not None else outcome.ended
        return text.append(f": {why} (stopped after: {reason}).", style="default")
    if outcome.error is not None and not outcome.error.out_of_memory:
        worst = largest_process(footprint)
        text = Text("The script failed", style="bold yellow")
        return text.append(
            f"; up to there it needs {format_size(worst.process_bytes)} of card memory.", style="default"
        )
    if not request.asked:
        worst = largest_process(footprint)
        smallest = next((card for card in outcome.cards if card.verdict == "yes"), None)
        text = Text(f"Needs {format_size(worst.process_bytes)}", style="bold")
        where = f"the smallest card that fits is {smallest.name}" if smallest else "no card of the catalogue is enough"
        peak = f" of card memory at the peak of {phase_name(footprint.limiting_phase)}: {where}."
        return text.append(peak + run_needs_more(footprint), style="default")
    return coloured_verdict(footprint, requested_device(request))


def _show_error(outcome: ScriptOutcome) -> None:
    assert outcome.error is not None
    sys.stderr.write(outcome.error.text)
    if outcome.error.hint and outcome.error.hint not in outcome.error.text:  # memfit's own errors have it
        sys.stderr.write(f"memfit: {outcome.error.hint}\n")


def _near(path: str) -> str:
    """A path as a person would write it from here."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def _lines(outcome: ScriptOutcome) -> Table:
    table = Table(box=None, pad_edge=False, title="\nLines that hold the peak", title_justify="left",
                  title_style="default")  # fmt: skip
    table.add_column("bytes", justify="right", no_wrap=True, min_width=8)
    table.add_column("tensors", justify="right", no_wrap=True, min_width=7)
    table.add_column("line", overflow="fold", min_width=24)
    table.add_column("code", overflow="ellipsis", no_wrap=True)
    for line in outcome.lines[:_TOP_LINES]:
        table.add_row(format_size(line.bytes), str(line.tensors), Text(place(line)), Text(line.text[:_CODE]))
    return table


def place(line: LineUse) -> str:
    """``train.py:12``, with the library's line below it where there is one."""
    own = f"{_near(line.file)}:{line.line}" if line.file else "(no line of yours)"
    if line.in_backward:
        own += " backward"
    return f"{own}\n  {_short(line.library_line)}" if line.library_line else own


def _short(path: str) -> str:
    _, separator, rest = path.rpartition(f"site-packages{os.sep}")
    return rest if separator else path


def _options(outcome: ScriptOutcome) -> Table:
    table = Table(box=None, pad_edge=False, title="\nWhat saves memory", title_justify="left", title_style="default")
    table.add_column("saves", justify="right")
    table.add_column("option")
    table.add_column("at", overflow="fold")
    table.add_column("write", overflow="fold")
    for option in outcome.options[:_TOP_OTHERS]:
        saves = "unknown" if option.saves_bytes is None else format_size(option.saves_bytes)
        file, _, number = option.where.rpartition(":")
        table.add_row(saves, option.name, f"{_near(file)}:{number}", Text(option.write))
    return table


def _cards(outcome: ScriptOutcome) -> Table:
    table = Table(box=None, pad_edge=False, title="\nCards", title_justify="left", title_style="default")
    table.add_column("card")
    table.add_column("usable", justify="right")
    table.add_column("needs", justify="right")
    table.add_column("verdict")
    for card in outcome.cards:
        word, colour = _CARD_WORDS[card.verdict]
        table.add_row(
            card.name, format_size(card.usable_bytes), format_size(card.process_bytes), Text(word, style=colour)
        )
    return table


def largest_batch(scan: BatchScan) -> str:
    """The largest batch, or why there is none, in one line."""
    largest = scan.largest
    if largest.batch is None:
        return f"No largest batch on {largest.card}: {largest.reason}."
    unchecked = f"computed; {largest.reason or 'not traced at that size'}"
    if largest.traced:
        larger = f"{largest.too_large} does not fit" if largest.too_large else "larger ones were not tried"
        unchecked = f"traced at that size; {larger}"
    checked = "traced at that size, and the next one does not fit" if largest.verified else unchecked
    assumes = f"; {largest.assumes}" if largest.assumes else ""
    return f"Largest batch on {largest.card}: {largest.batch} ({checked}{assumes})."


def _growth(outcome: ScriptOutcome) -> list[str]:
    """Lines that grow with each step, and after how many the device is full."""
    lines = []
    for each in outcome.growth[:_TOP_OTHERS]:
        what = "weights and their state, and with them all that a step makes, by " if each.of_weights else ""
        lines.append(f"Grows: {what}{format_size(each.bytes)} with each step, made at {_near(each.file)}:{each.line}.")
    spare = outcome.footprint.headroom_bytes if outcome.footprint is not None else 0
    if lines and spare > 0 and not any(each.of_weights for each in outcome.growth):
        steps = spare // sum(each.bytes for each in outcome.growth)
        lines.append(f"Full after about {steps:,} more steps: keep numbers, as loss.item(), or copies on the host.")
    return lines


def script_remarks(outcome: ScriptOutcome) -> list[str]:
    """Lines about what is kept, assumed and not seen, and what the sandbox held back."""
    lines = ["", *_growth(outcome)]
    for kept in outcome.kept[:_TOP_OTHERS]:
        where = f"{_near(kept.file)}:{kept.line}"
        lines.append(f"Kept between steps: {format_size(kept.bytes)} by {kept.name} (made at {where}).")
    for answer in outcome.assumed[:_TOP_OTHERS]:
        file, _, number = answer.where.rpartition(":")
        where = f"at {_short(_near(file))}:{number}" if file else "in a backward"
        lines.append(f"Assumed {where}: {answer.operator} gives {answer.answer}.")
    if len(outcome.assumed) > _TOP_OTHERS:
        lines.append(f"Assumed at {len(outcome.assumed) - _TOP_OTHERS} more lines: --json lists them.")
    here = f"{Path.cwd()}{os.sep}"
    lines += [f"Not seen: {text.replace(here, '')}." for text in outcome.not_seen]
    if outcome.failed_attempts:
        handled = f", which the code at {outcome.handler.replace(here, '')} handles" if outcome.handler else ""
        failed = f"{counted(outcome.failed_attempts, 'attempt')} ran out of memory{handled}"
        lines.append(f"{failed}; what they asked for does not count.")
    if outcome.sandboxed:
        names = [_near(change.path) for change in outcome.files]
        some = f": {', '.join(names[:3])}{' …' if len(names) > 3 else ''}" if names else ""
        lines.append(f"Sandboxed: no network, and {counted(len(names), 'file')} not written{some}.")
    else:
        lines.append("Not sandboxed (--unsafe-writes): what the script wrote is there.")
    return lines
