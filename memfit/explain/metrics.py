"""Reads a metrics file, a JSON object a line, as ``memfit run``, ``memfit.watch`` and other loggers write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.explain.evidence import Evidence
from memfit.explain.growth import growth_of, spike_of

_STEPS = ("window", "step", "global_step", "iteration", "iter", "_step")
_MEMORY = re.compile(r"(?:allocated|reserved|process|resident|memory|mem|vram|_bytes$)", re.IGNORECASE)
_SCALES = (("_bytes", 1), ("gib", 2**30), ("(gib)", 2**30), ("_gb", 2**30), ("mib", 2**20), ("_mb", 2**20))
_FIRST = ("measured_process_bytes", "process_bytes", "reserved_bytes", "allocated_bytes", "host_bytes")
"""The readings that are preferred, in this order."""
_HOST = re.compile(r"host|rss|cpu|\bram\b", re.IGNORECASE)
"""Readings of the host's memory."""
_NOT_READINGS = re.compile(r"predict|budget|limit|total|capacity|utili[sz]ation|percent|fraction|pct|%", re.IGNORECASE)


def read_metrics(text: str) -> Evidence | None:
    """Growth and spikes of the memory in a metrics file; None where fewer than half of the lines are objects, or none
    names bytes of memory."""
    objects, lines = [], [line for line in text.splitlines() if line.strip()]
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    if not objects or 2 * len(objects) < len(lines):
        return None
    series: dict[str, list[tuple[int, int]]] = {}
    for index, row in enumerate(objects):
        step = next((row[name] for name in _STEPS if _is_number(row.get(name))), index)
        for name, nbytes in _readings(row).items():
            series.setdefault(name, []).append((int(step), nbytes))
    grown = {name: growth_of(readings) for name, readings in series.items()}
    name = next((name for name in _FIRST if name in series), max(series, key=lambda key: len(series[key]), default=""))
    worst = next((key for key in dict.fromkeys([name, *_FIRST, *series]) if grown.get(key)), name)
    readings, growth = series.get(worst, []), grown.get(worst)
    if not readings:
        return None
    return Evidence(
        kind="metrics",
        growth=None if growth is None else replace(growth, of_host=bool(_HOST.search(worst))),
        spike=spike_of(readings),
        readings=len(readings),
        notes=(f"Read from {worst!r}, {len(readings)} lines.",),
    )


def _readings(row: Mapping[str, Any]) -> dict[str, int]:
    readings = {}
    for key, value in row.items():
        if not _is_number(value) or not _MEMORY.search(key) or _NOT_READINGS.search(key):
            continue
        scale = next((scale for ending, scale in _SCALES if key.lower().rstrip(")").endswith(ending.strip("()"))), None)
        if scale is not None:
            readings[key] = round(value * scale)
    return readings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**60
