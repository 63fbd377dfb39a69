"""The section of a report that shows a run's last memory failure, from RUN/flight.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.show.page import Section, Table
from memfit.show.run_log import number
from memfit.sizes import format_size


def flight_section(path: Path) -> list[Section]:
    """What was resident, the request that failed and what would have saved how much; nothing where none was written."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(record, dict):
        return []
    return [
        Section(
            title="The last memory failure",
            text=_failure_sentence(record),
            tables=[table for table in (_resident(record), _options(record)) if table.rows],
            folded=[table for table in (_modules(record),) if table.rows],
        )
    ]


def flight_line(path: Path) -> str:
    """The failed request in a few words, for a verdict; empty where there was none."""
    sections = flight_section(path)
    first = sections[0].text.split(". ")[0] if sections else ""
    return first[:1].lower() + first[1:]


def _failure_sentence(record: Mapping[str, Any]) -> str:
    asked = _size(record.get("requested_bytes"))
    where = f"in the {record.get('part', 'step')} of window {record.get('window', '?')}"
    text = f"Memory ran out {where}, micro-batch {record.get('micro_batch', '?')}: {asked} asked for"
    text += f", {_size(record.get('held_bytes'))} held, {_size(record.get('budget_bytes'))} allowed. "
    ids = record.get("ids")
    if isinstance(ids, list) and ids:
        more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        text += f"Samples: {', '.join(map(str, ids[:8]))}{more}. "
    return text + f"The library said: {record.get('message', '')}"


def _resident(record: Mapping[str, Any]) -> Table:
    resident = _mapping(record.get("resident"))
    measured, predicted = _mapping(resident.get("measured")), _mapping(resident.get("predicted_at_peak"))
    names = [n for n in dict.fromkeys([*measured, *predicted]) if number(measured.get(n)) or number(predicted.get(n))]
    rows = [
        (name, *(_size(sizes[name]) if name in sizes else "–" for sizes in (measured, predicted))) for name in names
    ]
    return Table(
        caption="What was resident: measured when it failed, and as predicted at the step's peak",
        columns=("category", "measured", "predicted"),
        rows=rows,
        numeric=("measured", "predicted"),
    )


def _modules(record: Mapping[str, Any]) -> Table:
    by_module = _mapping(record.get("resident")).get("by_module")
    entries = [_mapping(entry) for entry in by_module] if isinstance(by_module, list) else []
    rows = [(str(entry.get("module", "")), _size(entry.get("bytes"))) for entry in entries]
    caption = "Modules that held most of it: parameters, gradients and optimizer state"
    return Table(caption=caption, columns=("module", "bytes"), rows=rows, numeric=("bytes",), code=("module",))


def _options(record: Mapping[str, Any]) -> Table:
    options = record.get("options", record.get("levers"))
    entries = [_mapping(entry) for entry in options] if isinstance(options, list) else []
    rows = [(str(e.get("name", "")), _size(e.get("saves_bytes")), str(e.get("costs", ""))) for e in entries]
    caption = "Options that the plan does not apply, and what each would save"
    return Table(caption=caption, columns=("option", "saves", "costs"), rows=rows, numeric=("saves",), text=("costs",))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _size(value: Any) -> str:
    nbytes = number(value)
    return "unknown" if nbytes is None else format_size(int(nbytes))
