"""Tables for the terminal: the verdict first, then why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.engine.capabilities import CAPABILITIES
from memfit.show.console import make_console
from memfit.show.stage_table import stage_table
from memfit.sizes import format_size
from memfit.wording import LONGER, TURNS, counted, units_in_words

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.footprint import Footprint, PhaseFootprint
    from memfit.planner.prediction import Prediction

_COLOURS = {"yes": "green", "close": "yellow", "no": "red"}
_BAR = 24
_PLACES = 5
"""Number of assumptions to print in full."""


def show_prediction(prediction: Prediction, console: Console | None = None) -> None:
    """Prints the verdict, the peaks by phase, and what is alive at the highest peak."""
    console = console or make_console()
    footprint = prediction.footprint
    device = prediction.device
    console.print(prediction_headline(prediction))
    console.print(
        f"{prediction.job}, {micro_batch_words(prediction)} on {device.name}, "
        f"{format_size(device.usable_bytes or 0)} usable",
        style="dim",
    )
    if prediction.world > 1:
        console.print(rank_line(prediction), style="dim")
    for line in prediction.not_validated:
        console.print(f"Not validated: {line}.", style="yellow")
    console.print()
    console.print(phase_table(footprint, cuda=device.is_cuda))
    if prediction.stages:
        console.print(stage_table([asdict(stage) for stage in prediction.stages]))
    console.print(_categories(footprint))
    worst = footprint.phases[footprint.limiting_phase]
    phase = footprint.limiting_phase
    console.print(
        f"Peak in {place_name(worst.at.module, phase)} ({worst.at.operator}); "
        f"largest request {format_size(worst.largest_request.bytes)} "
        f"in {place_name(worst.largest_request.module, phase)}.",
        soft_wrap=False,
    )
    for line in footprint_remarks(footprint, prediction.engine):
        console.print(line, style="dim")


def micro_batch_words(prediction: Prediction) -> str:
    """``8 samples``, ``3200 frames (8x400)``."""
    units = units_in_words(prediction.micro_batch, prediction.unit)
    return units if prediction.shape.length is None else f"{units} ({prediction.shape})"


def rank_line(prediction: Prediction) -> str:
    """The rank that is shown, where it is in the mesh, and why no rank needs more."""
    line = f"rank {prediction.rank} of {prediction.world} on {prediction.engine}"
    if prediction.mesh:
        line += f", mesh {' x '.join(f'{name} {size}' for name, size in prediction.mesh.items())}"
    return f"{line}; {prediction.rank_reason}" if prediction.rank_reason else line


def show_predictions(predictions: Sequence[Prediction], console: Console | None = None) -> None:
    """Prints how many devices a job fits, and a row for each."""
    console = console or make_console()
    fitting = [prediction for prediction in predictions if prediction.footprint.verdict == "yes"]
    first = predictions[0]
    more = any_needs_more(prediction.footprint for prediction in predictions)
    console.print(f"Fits on {len(fitting)} of {len(predictions)} devices.{more}", style="bold")
    console.print(f"{first.job}, {micro_batch_words(first)}\n", style="dim")
    table = Table(box=None, pad_edge=False)
    for name in ("device", "fits", "process", "usable", "to spare", "peak"):
        table.add_column(name, justify="left" if name in ("device", "fits", "peak") else "right", no_wrap=True)
    for prediction in predictions:
        footprint, spare = prediction.footprint, prediction.footprint.headroom_bytes
        need = largest_process(footprint).process_bytes
        table.add_row(
            prediction.device.key, footprint.verdict, format_size(need),
            format_size(prediction.device.usable_bytes or 0), f"{'-' if spare < 0 else ''}{format_size(abs(spare))}",
            phase_name(footprint.limiting_phase),
        )  # fmt: skip
    console.print(table)


def footprint_remarks(footprint: Footprint, engine: str = "single") -> list[str]:
    """Lines about an interval without measured runs, cuDNN's plan searches, and assumed sizes.

    Args:
        engine: of the run that the footprint is of.
    """
    lines = []
    if footprint.limiting_phase == "setup":
        instead = (
            "without initialise(self, net, module) each rank builds them whole; with it, one module at a time."
            if CAPABILITIES[engine].takes_meta_nets
            else "create them in their final type and on the device (torch.set_default_dtype, from_config(dtype=...)) "
            "instead of converting a copy afterwards."
        )
        lines.append(f"Building the nets needs more than training them: {instead}")
    if footprint.measured_runs == 0:
        kind = footprint.net_kind or "unknown"
        lines.append(f"No measured runs of this model type ({kind}): showing the widest interval.")
    if footprint.plan_searches:
        lines.append(
            f"cudnn.benchmark searches for plans {footprint.plan_searches} times in the first step: the card's memory "
            "use may rise briefly, up to all of it. The run does not need that memory and does not fail without it."
        )
    return lines + assumptions(footprint)


def assumptions(footprint: Footprint) -> list[str]:
    """What ``tp`` leaves whole where that is most, and sizes that were assumed where they depend on data."""
    lines = [*whole_on_ranks(footprint), *(f"Assumed: {line}." for line in footprint.assumed[:_PLACES])]
    if len(footprint.assumed) > _PLACES:
        lines.append(f"{counted(len(footprint.assumed) - _PLACES, 'more assumption')}: --json lists them.")
    return lines


def whole_on_ranks(footprint: Footprint) -> list[str]:
    """A line where ``tp`` cuts less than half of the parameters."""
    cut = footprint.tensor_parallel
    if cut is None or 2 * cut.cut >= cut.parameters:
        return []
    of = f"{cut.cut / 1e6:,.3g} M of {cut.parameters / 1e6:,.3g} M parameters"
    return [f"tp cuts {of}; the others are whole on each of its ranks."]


def prediction_headline(prediction: Prediction) -> Text:
    """The verdict in one line."""
    return coloured_verdict(prediction.footprint, prediction.device)


def coloured_verdict(footprint: Footprint, device: Device) -> Text:
    """``verdict_line`` with its verdict in colour."""
    verdict, _, rest = verdict_line(footprint, device).partition(" on ")
    text = Text(verdict, style=f"bold {_COLOURS[footprint.verdict]}")
    return text.append(f" on {rest}", style="default")


def verdict_line(footprint: Footprint, device: Device) -> str:
    """``Fits on RTX 4090 with 12.2 GiB to spare (peak: training, 11.3 of 23.5 GiB).``, and what that hangs on."""
    return _verdict(footprint, device) + run_needs_more(footprint)


def run_needs_more(footprint: Footprint | None) -> str:
    """Sentences where loops that wait for data were taken to end, as those of an adaptive solver, and where memory
    grows with each step; else empty.
    """
    return "" if footprint is None else _if_loops_end(footprint) + _if_memory_grows(footprint)


def any_needs_more(footprints: Iterable[Footprint]) -> str:
    """As ``run_needs_more`` of the first footprint of which there is something to say."""
    return next(filter(None, map(run_needs_more, footprints)), "")


def _if_memory_grows(footprint: Footprint) -> str:
    places = [line.partition(": ")[0] for line in footprint.assumed if line.endswith(LONGER)]
    if not places or footprint.verdict == "no":
        return ""
    more = f" and {counted(len(places) - 1, 'more line')}" if len(places) > 1 else ""
    return f" A longer run needs more: memory grows at {places[0]}{more}."


def _if_loops_end(footprint: Footprint) -> str:
    loops = [line.partition(": ")[0] for line in footprint.assumed if line.endswith(TURNS)]
    if not loops or footprint.verdict == "no":
        return ""
    more = f" and {counted(len(loops) - 1, 'more loop')}" if len(loops) > 1 else ""
    return f" A run needs more if the loop at {loops[0]}{more} makes more turns than were traced."


def _verdict(footprint: Footprint, device: Device) -> str:
    worst = largest_process(footprint)
    usable = device.usable_bytes or 0
    peak = f"peak: {phase_name(footprint.limiting_phase)}, {of_sizes(worst.process_bytes, usable)}"
    if footprint.failed_request:
        request = footprint.failed_request
        return (
            f"Does not fit on {short_name(device)}: {phase_name(request.phase)} fails to allocate "
            f"{format_size(request.bytes)} in {place_name(request.module, request.phase)} ({peak})."
        )
    spare = format_size(footprint.headroom_bytes)
    if footprint.verdict == "yes":
        return f"Fits on {short_name(device)} with {spare} to spare ({peak})."
    high = format_size(worst.process_bytes_high)
    if not device.is_cuda:
        more = format_size(worst.process_bytes_high - worst.process_bytes)
        return (
            f"May not fit on {short_name(device)}: {spare} to spare, but what is no tensor (Python, autograd's graph) "
            f"may take {more} ({peak})."
        )
    return f"May not fit on {short_name(device)}: {spare} to spare, but the interval reaches {high} ({peak})."


def largest_process(footprint: Footprint) -> PhaseFootprint:
    """The phase with the largest process. It may come after the limiting one, with a cache that is a little larger."""
    return max(footprint.phases.values(), key=lambda phase: phase.process_bytes)


_PHASE_NAMES = {"train": "training", "validate": "validation", "save": "saving"}


def phase_name(phase: str) -> str:
    """What a reader sees for a phase: ``training`` for ``train``."""
    return _PHASE_NAMES.get(phase, phase)


def place_name(module: str, phase: str) -> str:
    """Where something is allocated: the module, or what runs outside of modules in this phase."""
    outside = {"train": "the step", "setup": "the building of the nets"}
    return module or outside.get(phase) or phase_name(phase)


def short_name(device: Device) -> str:
    """The card's name without its maker: ``RTX 4090``."""
    return device.name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def of_sizes(nbytes: int, limit: int) -> str:
    """``11.3 of 23.5 GiB``: both sizes, with one unit where they share it."""
    (part, part_unit), (total, unit) = (format_size(size).split(" ") for size in (nbytes, limit))
    return f"{part} of {total} {unit}" if part_unit == unit else f"{part} {part_unit} of {total} {unit}"


def phase_table(footprint: Footprint, *, cuda: bool) -> Table:
    """The peak of each phase; on a card also what is reserved, the process and its interval."""
    table = Table(box=None, pad_edge=False)
    table.add_column("phase")
    for name in ("allocated", "reserved", "process", "interval") if cuda else ("allocated",):
        table.add_column(name, justify="right")
    for name, phase in footprint.phases.items():
        cells = [format_size(phase.allocated_bytes)]
        if cuda:
            low, high = format_size(phase.process_bytes_low), format_size(phase.process_bytes_high)
            cells += [format_size(phase.reserved_bytes), format_size(phase.process_bytes), f"{low} to {high}"]
        table.add_row(name, *cells)
    return table


def _categories(footprint: Footprint) -> Table:
    worst = footprint.phases[footprint.limiting_phase]
    total = max(sum(worst.categories.values()), 1)
    table = Table(
        box=None,
        pad_edge=False,
        title=f"\nAlive at the peak of {phase_name(footprint.limiting_phase)}",
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
