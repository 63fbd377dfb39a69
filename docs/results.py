"""Reading bench/results, and writing figures of them as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
EARLIER = RESULTS / "before-2026-11-22"
GIB = 2**30


def result(name: str) -> dict[str, Any]:
    """The figures of a benchmark: those of its own command, else those that were kept from before it wrote them."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads((path if path.exists() else EARLIER / path.name).read_text())
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def percent(part: float, digits: int = 2) -> str:
    return f"{100 * part:.{digits}f}"
