"""The sections of a report that show a step's memory: over its events, by part, by module, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memfit.events import CATEGORIES
from memfit.planner.prediction import Prediction
from memfit.show.module_totals import ITSELF, module_totals
from memfit.show.page import Section, Table
from memfit.show.timeline import Timeline, allocator_limit, place_of, timeline
from memfit.sizes import format_size

LAYERS = (
    "parameters",
    "frozen",
    "buffers",
    "ema",
    "optimizer",
    "gradients",
    "inputs",
    "activations",
    "communication",
    "workspace",
    "temporaries",
)
"""Categories from the bottom of the chart up: what stays longest is lowest."""
HATCHES = {
    "frozen": "up",
    "buffers": "tall",
    "ema": "dots",
    "gradients": "flat",
    "inputs": "tall",
    "temporaries": "down",
    "communication": "dots",
}
"""Layers that are told from their neighbours by more than colour."""


def memory_sections(prediction: Prediction, state: Mapping[str, Mapping[str, int]]) -> list[Section]:
    """Sections of a prediction.

    Args:
        state: bytes by module path and category of what the nets hold.
    """
    line = timeline(prediction.trace, prediction.device)
    if not len(line.events):
        return []
    return [_over_the_step(prediction, line), _modules(prediction, line, state), _phases(prediction)]


def _over_the_step(prediction: Prediction, line: Timeline) -> Section:
    device = prediction.device
    text = "Bytes that tensors ask for and that are alive, after every event of the step"
    if device.is_cuda:
        usable, context = format_size(device.usable_bytes or 0), format_size(device.context_bytes or 0)
        text += "; dotted: what the allocator holds for them, free blocks included. "
        text += f"The limit is what the allocator may hold: {usable} usable less {context} of CUDA context"
    rows = []
    for span in line.spans:
        module, operator = place_of(prediction.trace, span.peak_event)
        rows.append(
            (
                span.phase,
                span.part,
                format_size(span.peak),
                f"{span.end - span.start:,}",
                module or "–",
                operator or "–",
            )
        )
    parts = Table(
        caption="Every part of the step: its peak, and where that is",
        columns=("phase", "part", "peak", "events", "module", "operator"),
        rows=rows,
        numeric=("peak", "events"),
        code=("module", "operator"),
    )
    return Section(title="Memory over the step", text=f"{text}.", figure=_figure(prediction, line), folded=[parts])


def _figure(prediction: Prediction, line: Timeline) -> dict[str, Any]:
    trace = prediction.trace
    rows = trace.operator[line.events]
    pairs = [
        (trace.modules[trace.operator_module[row]], trace.names[trace.operator_name[row]]) for row in rows.tolist()
    ]
    places = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    alive = dict(zip(CATEGORIES, line.alive, strict=True))
    phases: dict[str, dict[str, Any]] = {}
    for span in line.spans:
        phases.setdefault(span.phase, {"name": span.phase, "start": span.start})["end"] = span.end
    return {
        "kind": "timeline",
        "id": "timeline",
        "x": line.events.tolist(),
        "bands": [
            {"name": name, "y": alive[name].tolist(), "hatch": HATCHES.get(name, "")}
            for name in LAYERS
            if alive[name].any()
        ],
        "total": line.total.tolist(),
        "held": None if line.held is None else line.held.tolist(),
        "places": list(places),
        "place": [places[pair] for pair in pairs],
        "spans": [{"phase": s.phase, "part": s.part, "start": s.start, "end": s.end} for s in line.spans],
        "phases": list(phases.values()),
        "limit": allocator_limit(prediction.device),
        "failed": line.failed,
        "count": line.count,
        "start": _index(line, _highest(line)),
        "goto": _goto(line),
    }


def _goto(line: Timeline) -> list[dict[str, Any]]:
    """Moments that a button leads to: the peak of each phase, and the failure."""
    moments = []
    for phase in dict.fromkeys(span.phase for span in line.spans):
        highest = max((span for span in line.spans if span.phase == phase), key=lambda span: span.peak)
        moments.append({"name": f"peak of {phase}", "index": _index(line, highest.peak_event)})
    if line.failed is not None:
        moments.append({"name": "failed request", "index": _index(line, line.failed)})
    return moments


def _highest(line: Timeline) -> int:
    return max(line.spans, key=lambda span: span.peak).peak_event


def _index(line: Timeline, event: int) -> int:
    return int(np.searchsorted(line.events, event))


def _modules(prediction: Prediction, line: Timeline, state: Mapping[str, Mapping[str, int]]) -> Section:
    event = _highest(line)
    rows = module_totals(prediction.trace, event, state)
    columns = [name for name in LAYERS if any(row.categories.get(name) for row in rows)]
    total = sum(row.total for row in rows)
    modes = prediction.checkpointing
    more = ["recomputed"] if modes else []
    cells = []
    for row in rows:
        recomputed = _recomputed(row.module.removesuffix(ITSELF), modes)
        cells.append(
            (
                row.module,
                format_size(row.total),
                row.total / total,
                *(format_size(row.categories[name]) if row.categories.get(name) else "–" for name in columns),
                *([recomputed] if modes else []),
            )
        )
    table = Table(
        caption=f"{format_size(total)} alive at the peak",
        columns=("module", "alive", "share", *columns, *more),
        rows=cells,
        numeric=("alive", *columns),
        code=("module",),
    )
    module, operator = place_of(prediction.trace, event)
    text = (
        f"The peak is in {module or 'no module'} ({operator or 'unknown'}). "
        "A module's row has all that is inside of it, and what it asked for itself."
    )
    return Section(title="By module, at the peak", text=text, tables=[table])


def _recomputed(module: str, modes: Mapping[str, str]) -> str:
    inside = [
        mode
        for path, mode in modes.items()
        if path == module or path.startswith(module + ".") or module.startswith(path + ".")
    ]
    return f"{len(inside)} × {inside[0]}" if inside and len(set(inside)) == 1 else "mixed" if inside else "–"


def _phases(prediction: Prediction) -> Section:
    footprint, device = prediction.footprint, prediction.device
    cuda, budget = device.is_cuda, device.usable_bytes or 0
    columns = (
        "phase",
        "allocated",
        *(("reserved", "process", "interval") if cuda else ()),
        "of the limit",
        "largest request",
        "module",
        "operator",
    )
    rows = []
    for name, phase in footprint.phases.items():
        interval = f"{format_size(phase.process_bytes_low)} to {format_size(phase.process_bytes_high)}"
        more = (format_size(phase.reserved_bytes), format_size(phase.process_bytes), interval) if cuda else ()
        part = f"{phase.process_bytes / budget:.0%}" if budget else "unknown"
        largest = phase.largest_request
        asked = (
            (format_size(largest.bytes), largest.module or "–", largest.operator or "–")
            if largest.bytes
            else ("none", "–", "–")
        )
        rows.append((name, format_size(phase.allocated_bytes), *more, part, *asked))
    text = "Process is what nvidia-smi shows: reserved, with the CUDA context and what libraries hold." if cuda else ""
    table = Table(
        caption=f"Peaks by phase; the limit is {format_size(budget)}",
        columns=columns,
        rows=rows,
        numeric=columns[1:-2],
        code=("module", "operator"),
    )
    return Section(title="Phases", text=text, tables=[table])
