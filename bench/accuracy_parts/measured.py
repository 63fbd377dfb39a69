"""Measured steps: lines of JSON under bench/measured/, written by bench/measure_gpu.py, one file for each card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from memfit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One configuration that was really run: two windows, validation where the job has one, and saving."""

    card: str
    """The catalogue's name of the device."""
    driver: str | None
    torch: str
    job: str
    settings: dict[str, Any]
    micro_batch: int
    """Units in one micro-batch, as ``--micro-batch`` counts them."""
    precision: str
    checkpoint: str
    memory_gib: float | None
    """What ``set_per_process_memory_fraction`` left of the card; None: all of it."""
    ok: bool
    """False: the step ran out of memory; its bytes are those when it did."""
    allocated_bytes: int
    """Highest ``max_memory_allocated``; on a CPU the allocator's own events."""
    reserved_bytes: int | None
    process_bytes: int | None
    """Peak reserved, and what NVML tells of the process beyond what it has reserved."""
    step_seconds: float | None
    """Median of the windows after the second."""


def read_measured(path: Path) -> Iterator[Measured]:
    """The lines of one file.

    Raises:
        InputError: a line that is not one of these.
    """
    names = {field.name for field in fields(Measured)}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields_read = json.loads(line)
            yield Measured(**fields_read)
        except (json.JSONDecodeError, TypeError) as error:
            write = f"write one JSON object with {', '.join(sorted(names))}"
            raise InputError(f"{path.name}, line {number}", str(error), write) from error


def append_measured(path: Path, run: Measured) -> None:
    """Adds a line; what was measured before stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")
