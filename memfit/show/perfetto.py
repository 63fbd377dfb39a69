"""A predicted timeline in Chrome's trace format, which ui.perfetto.dev opens: memory as counters, operators as slices.

Source of the form: "Trace Event Format" (Google, 2016): phases ``C`` (counters), ``X`` (complete slices) and ``M``
(names). A trace knows the order of events and not their time: a microsecond is one event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from memfit.atomic_file import open_atomic
from memfit.errors import unwritable
from memfit.events import CATEGORIES, Trace
from memfit.show.timeline import alive_by_category, spans_of

PHASES, PARTS, OPERATORS = 1, 2, 3
"""Threads of the process that slices are drawn in."""


def write_perfetto(path: Path, trace: Trace, name: str) -> None:
    """Writes the trace; ``name`` is what the process is called.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        with open_atomic(path) as file:
            file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
            file.write(",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries(trace, name)).encode())
            file.write(b"\n]}\n")
    except OSError as error:
        raise unwritable(f"--trace {path}", error) from error


def entries(trace: Trace, name: str) -> Iterator[dict[str, Any]]:
    """The trace's entries: names, then slices of phases, parts and operators, then counters."""
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}
    for thread, label in ((PHASES, "phases"), (PARTS, "parts"), (OPERATORS, "operators")):
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": label}}
    alive = alive_by_category(trace)
    spans = spans_of(trace, alive.sum(0))
    for phase in dict.fromkeys(span.phase for span in spans):
        own = [span for span in spans if span.phase == phase]
        yield _slice(PHASES, phase, own[0].start, own[-1].end)
    for span in spans:
        yield _slice(PARTS, span.part, span.start, span.end)
    yield from _operators(trace)
    yield from _counters(alive)


def _slice(thread: int, name: str, start: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": thread, "ts": start, "dur": end - start, "name": name}


def _operators(trace: Trace) -> Iterator[dict[str, Any]]:
    rows = trace.operator
    if not len(rows):
        return
    edges = np.concatenate([[0], 1 + np.flatnonzero(np.diff(rows)), [len(rows)]]).tolist()
    for start, end in pairwise(edges):
        row = int(rows[start])
        args = {
            "module": trace.modules[trace.operator_module[row]],
            "flops": int(trace.operator_flops[row]),
            "bytes": int(trace.operator_bytes[row]),
        }
        yield _slice(OPERATORS, trace.names[trace.operator_name[row]], start, end) | {"args": args}


def _counters(alive: np.ndarray) -> Iterator[dict[str, Any]]:
    """A value of a category wherever it changes, and of all together."""
    for name, values in (("allocated", alive.sum(0)), *zip(CATEGORIES, alive, strict=True)):
        if not values.any():
            continue
        changes = np.flatnonzero(np.diff(values, prepend=0))
        for event, value in zip(changes.tolist(), values[changes].tolist(), strict=True):
            yield {"ph": "C", "pid": 1, "ts": event, "name": name, "args": {"bytes": value}}
