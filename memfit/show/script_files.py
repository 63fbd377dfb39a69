"""A traced script as files: the report, the snapshot for memory_viz, the events."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from memfit.device.hardware.catalogue import Device, find_device, with_memory
from memfit.errors import unwritable
from memfit.job import Shape
from memfit.planner.predict import Prediction
from memfit.script.outcome import ScriptOutcome, TraceRequest
from memfit.show.page import Page, Section, Table, write_page
from memfit.show.report import TONES
from memfit.show.report_memory import memory_sections
from memfit.show.script_table import place, script_headline, script_remarks
from memfit.show.snapshot import write_snapshot
from memfit.show.timeline import allocator_limit
from memfit.show.trace_file import write_trace
from memfit.sizes import format_size


def write_script_files(
    request: TraceRequest, outcome: ScriptOutcome, *, report: str | None, snapshot: str | None, trace: str | None
) -> None:
    """Writes the files that are asked for.

    Raises:
        InputError: one cannot be written.
    """
    prediction = as_prediction(request, outcome)
    if snapshot:
        try:
            write_snapshot(Path(snapshot), prediction.trace, allocator_limit(prediction.device))
        except OSError as error:
            raise unwritable(f"--snapshot {snapshot}", error) from error
    if trace and trace.endswith(".npz"):
        write_trace(Path(trace), prediction)
    elif trace:
        from memfit.show.perfetto import write_perfetto

        write_perfetto(Path(trace), prediction.trace, f"{prediction.job} on {prediction.device.name}")
    if report:
        write_page(_page(request, outcome, prediction), report)


def as_prediction(request: TraceRequest, outcome: ScriptOutcome) -> Prediction:
    """The trace in the form that reports and files take; its options are among the settings."""
    assert outcome.trace is not None
    assert outcome.footprint is not None
    device: Device = find_device(request.device)
    if request.memory_bytes is not None:
        device = with_memory(device, request.memory_bytes)
    return Prediction(
        job=request.command.target,
        settings={"args": list(request.command.args), "options": [asdict(option) for option in outcome.options]},
        shape=Shape(items=1),
        micro_batch=1,
        unit="batch",
        device=device,
        nets=(),
        footprint=outcome.footprint,
        trace=outcome.trace,
        seconds=outcome.seconds,
        world=outcome.world,
        rank=request.rank,
    )


def _page(request: TraceRequest, outcome: ScriptOutcome, prediction: Prediction) -> Page:
    assert outcome.footprint is not None
    lines = Table(
        caption="Lines of the script by the bytes alive at the peak",
        columns=("line", "bytes", "tensors", "code"),
        code=("line", "code"),
        rows=[(place(line), format_size(line.bytes), line.tensors, line.text) for line in outcome.lines],
    )
    options = Table(
        caption="What saves memory",
        columns=("option", "saves", "at", "write"),
        code=("at", "write"),
        rows=[
            (
                option.name,
                "unknown" if option.saves_bytes is None else format_size(option.saves_bytes),
                option.where,
                option.write,
            )
            for option in outcome.options
        ],
    )
    cards = Table(
        caption="Cards",
        columns=("card", "usable", "needs", "verdict"),
        rows=[
            (card.name, format_size(card.usable_bytes), format_size(card.process_bytes), card.verdict)
            for card in outcome.cards
        ],
    )
    tables = [table for table in (lines, options, cards) if table.rows]
    return Page(
        title=f"trace of {request.command.target}",
        verdict=script_headline(request, outcome).plain.rstrip("."),
        tone=TONES[outcome.footprint.verdict],
        about=[" ".join([request.command.target, *request.command.args]), f"on {prediction.device.name}"],
        sections=[Section(title="The script", tables=tables), *memory_sections(prediction, {})],
        notes=[line for line in script_remarks(outcome) if line],
    )
