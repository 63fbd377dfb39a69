"""metrics.jsonl and samples.jsonl: reading what is whole in them, and naming what is lost.

A file may be damaged between two runs: a line cut or overwritten, bytes that are no UTF-8, other JSON, lines that are
missing. The checkpoint decides which windows were trained; a lost line is said and costs no window.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from memfit.train.line_parts import all_lines, parts_of

END_BYTES = 1 << 20
"""Of a file, in which its last whole line is looked for."""
LINE_BYTES = 2048
"""Of a line's first buffer, which grows where that is too little."""
_ENCODER = msgspec.json.Encoder(enc_hook=lambda value: value.tolist())


@dataclass(frozen=True, kw_only=True)
class LinesRead:
    """The whole lines of a file, each window (and rank) once, in the order of windows."""

    lines: list[dict[str, Any]]
    damaged: int
    """Lines that are no JSON object with a window, or that repeat one."""


def expected_bytes(line: Mapping[str, Any]) -> Any:
    """What a window's measured peak is compared with: the planned bytes of the process; in lines of earlier versions
    the predicted ones."""
    return line.get("planned_process_bytes") or line.get("predicted_process_bytes")


def read_lines(path: Path) -> LinesRead:
    """Reads a file of lines and its parts; one that is not there has none."""
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    damaged = 0
    for text in all_lines(path):
        if not text.strip():
            continue
        line = parse_line(text)
        if line is None or (line["window"], line.get("rank", 0)) in lines:
            damaged += 1
        else:
            lines[line["window"], line.get("rank", 0)] = line
    return LinesRead(lines=[lines[key] for key in sorted(lines)], damaged=damaged)


def last_window(path: Path) -> int:
    """The last window that a file or its parts have a line of; -1 where there is none. Only ends are read."""
    return max([window_range(path)[1], *(part.last for part in parts_of(path))])


def window_range(path: Path) -> tuple[int, int]:
    """The first and the last window in a file's ends, without its parts; (-1, -1) where there is no whole line."""
    try:
        with open(path, "rb") as file:
            content = file.read(END_BYTES)
            file.seek(max(os.fstat(file.fileno()).st_size - END_BYTES, 0))
            content += b"\n" + file.read()
    except OSError:
        return -1, -1
    windows = [line["window"] for line in map(parse_line, content.split(b"\n")) if line is not None]
    return min(windows, default=-1), max(windows, default=-1)


def kept_before(path: Path, window: int) -> Iterator[bytes]:
    """The whole lines of windows before this one, each window (and rank) once, in the order of the file. One line is
    held in memory at a time, and a byte for each window."""
    present: dict[int, bytearray] = {}
    for text in all_lines(path):
        line = parse_line(text)
        if line is None or line["window"] >= window:
            continue
        of_rank = present.setdefault(line.get("rank", 0), bytearray(window))
        if not of_rank[line["window"]]:
            of_rank[line["window"]] = 1
            yield text if text.endswith(b"\n") else text + b"\n"


def line_of_window(path: Path, window: int) -> dict[str, Any] | None:
    """A window's first line, without reading parts that lack it; None where there is none."""
    for text in all_lines(path, window):
        line = parse_line(text)
        if line is not None and line["window"] == window:
            return line
    return None


def count_windows(path: Path) -> int:
    """The number of windows that a file and its parts have a line of."""
    return len({line["window"] for line in map(parse_line, all_lines(path)) if line is not None})


def parse_line(text: bytes) -> dict[str, Any] | None:
    """A line's object; None where it is no object with a window that counts from 0."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    has_counts = all(_is_count(line.get(name, 0)) for name in ("window", "rank"))
    return line if "window" in line and has_counts else None


def format_line(line: dict[str, Any]) -> bytes:
    """A line of JSON; a number that is not finite becomes null, which JSON has.

    Raises:
        MemoryError: at a limit on memory. ``msgspec.json.encode`` and ``orjson.dumps`` end the process there: they
            write to the buffer that they could not make.
    """
    text = bytearray(LINE_BYTES)
    try:
        _ENCODER.encode_into(line, text)
    except (TypeError, ValueError, AttributeError):  # a key, a value or a character that only json knows how to write
        return json.dumps(_finite(line), allow_nan=False).encode() + b"\n"
    text += b"\n"
    return bytes(text)


def missing_windows(present: bytes | bytearray) -> list[int]:
    """Windows that have no line, of a byte for each that is not 0 where it has one."""
    return [number for number, has_line in enumerate(present) if not has_line]


def describe_windows(numbers: list[int]) -> str:
    """``3, 7-9``: at most eight ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:8]]
    return ", ".join(words) + (" …" if len(ranges) > 8 else "")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
