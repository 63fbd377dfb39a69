"""Reading bench/results, and writing figures of them as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.result_file import read_result as result

__all__ = ["GIB", "gib", "percent", "result", "table"]

GIB = 2**30


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def percent(part: float, digits: int = 2) -> str:
    return f"{100 * part:.{digits}f}"
