"""Reads a log: ranks' prefixes, tracebacks, the steps before a failure and the memory that it prints with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.explain.evidence import SIZE, Evidence, Frame, MemoryFailure, parse_size
from memfit.explain.growth import growth_of, spike_of
from memfit.explain.messages import kind_of, read_message

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    r"^(?:\[(?:rank|default|Rank ?)(\d+)\]:?|\((?:rank|Rank)[ :=]*(\d+)\)|\[(\d+)\]:|(\d{1,5}):(?=\s)"
    r"|\[[^\]]*rank[ :=]?(\d+)[^\]]*\])\s?"
)
"""How torchrun, DeepSpeed, srun --label and loggers name the rank at the beginning of a line."""
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)(?:, in (.+))?$')
_BOXED_FRAME = re.compile(r"^[│|]\s*(\S+\.py):(\d+) in (\S+)")
"""A frame as rich prints it."""
_STEP = re.compile(
    r"\b(?:global_step|step|iter(?:ation)?|it|batch)\b['\"]?[\s:=#\[(]*(\d+)|\|\s*(\d+)/\d+\s*\[", re.IGNORECASE
)
_MEMORY = re.compile(
    rf"\b((?:max[_ ]|peak[_ ])?(?:gpu[_ ]|cuda[_ ])?(?:mem(?:ory)?(?:[_ ](?:allocated|reserved|used|usage))?"
    rf"|allocated|reserved|vram))['\"]?\s*[:=]?\s*{SIZE}",
    re.IGNORECASE,
)
_MESSAGE_LINES = 12
"""Lines that a message may be wrapped over."""

Numbered = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class _LocatedFailure:
    """A failure and where in the log it stands."""

    line: int
    failure: MemoryFailure


def read_log(text: str) -> Evidence | None:
    """What a log says; None where it names neither a memory failure nor memory step by step."""
    by_rank: dict[int | None, list[Numbered]] = {}
    series: dict[str, list[tuple[int, int]]] = {}
    for number, line in enumerate(_ANSI.sub("", text).replace("\r", "\n").split("\n")):
        rank, rest = _without_prefix(line)
        by_rank.setdefault(rank, []).append((number, rest))
        _add_reading(rank, rest, series)
    numbered = [failure for rank, lines in by_rank.items() for failure in _failures(rank, lines)]
    failures = _essential([each.failure for each in sorted(numbered, key=lambda each: each.line)])
    readings = max(series.values(), key=len, default=[])
    if not failures and len(readings) < 2:
        return None
    short = sum(len(lines) for lines in by_rank.values()) <= 3
    return Evidence(
        kind="message" if short else "log",
        failures=failures,
        growth=growth_of(readings),
        spike=spike_of(readings),
        readings=len(readings),
    )


def _without_prefix(line: str) -> tuple[int | None, str]:
    match = _PREFIX.match(line)
    if match is None:
        return None, line
    return int(next(group for group in match.groups() if group is not None)), line[match.end() :]


def _add_reading(rank: int | None, line: str, series: dict[str, list[tuple[int, int]]]) -> None:
    step = _STEP.search(line)
    if step is None or kind_of(line):
        return
    number = int(step[1] or step[2])
    for name, value, unit in _MEMORY.findall(line):
        readings = series.setdefault(f"{rank} {name.lower()}", [])
        if not readings or readings[-1][0] < number:
            readings.append((number, parse_size(value, unit)))


def _failures(rank: int | None, lines: Sequence[Numbered]) -> list[_LocatedFailure]:
    """Every failure in the lines of one rank, with the traceback above it and the last step before it."""
    failures: list[_LocatedFailure] = []
    frames: list[Frame] = []
    step: int | None = None
    for index, (number, line) in enumerate(lines):
        if line.lstrip(" │|╭").startswith("Traceback (most recent call last)"):
            frames = []
        frame = _frame(lines, index)
        if frame is not None:
            frames.append(frame)
            continue
        kind = kind_of(line)
        if kind is None:
            match = _STEP.search(line)
            step = int(match[1] or match[2]) if match else step
            continue
        failure = read_message(_message(lines, index), kind)
        failures.append(
            _LocatedFailure(line=number, failure=replace(failure, rank=rank, frames=tuple(frames), step=step))
        )
        frames = []
    return failures


def _frame(lines: Sequence[Numbered], index: int) -> Frame | None:
    line = lines[index][1]
    match = _FRAME.match(line) or _BOXED_FRAME.match(line)
    if match is None:
        return None
    below = lines[index + 1][1].strip() if index + 1 < len(lines) else ""
    is_source = bool(below) and not _FRAME.match(lines[index + 1][1]) and not kind_of(below) and "│" not in below
    return Frame(file=match[1], line=int(match[2]), function=match[3] or "", text=below if is_source else "")


def _message(lines: Sequence[Numbered], index: int) -> str:
    """The message that begins at this line; a pasted one may be wrapped."""
    parts = [lines[index][1]]
    for _, line in lines[index + 1 : index + _MESSAGE_LINES]:
        if not line.strip() or kind_of(line) or line.startswith("Traceback") or _FRAME.match(line):
            break
        parts.append(line)
    return " ".join(part.strip() for part in parts) if len(parts) > 1 else parts[0]


def _essential(failures: Sequence[MemoryFailure]) -> tuple[MemoryFailure, ...]:
    """The failures without repeats, and without the endings of processes that an allocator's refusal explains."""
    seen: dict[tuple[object, ...], MemoryFailure] = {}
    for failure in failures:
        key = (failure.rank, failure.allocator, failure.requested, failure.free, failure.allocated)
        if key not in seen or (failure.frames and not seen[key].frames):
            seen[key] = failure
    distinct = list(seen.values())
    with_figures = [failure for failure in distinct if failure.allocator != "host" or failure.allocated is not None]
    numbered = [failure for failure in with_figures if failure.requested is not None]
    return tuple(
        failure
        for failure in with_figures or distinct
        if failure.requested is not None or not any(other.rank == failure.rank for other in numbered)
    )
