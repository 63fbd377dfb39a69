"""Reads a log: ranks' prefixes, tracebacks, the steps before a failure and the memory that it prints with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.explain.evidence import Evidence, Frame, MemoryFailure
from memfit.explain.memory_lines import MemoryLines, step_of
from memfit.explain.messages import kind_of, read_message

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    r"^(?:\[(?:rank|default|Rank ?)(\d{1,9})\]:?|\((?:rank|Rank)[ :=]*(\d{1,9})\)|\[(\d{1,9})\]:|(\d{1,5}):(?=\s)"
    r"|\[[^\]]*rank[ :=]?(\d{1,9})[^\]]*\])\s?"
)
"""How torchrun, DeepSpeed, srun --label and loggers name the rank at the beginning of a line."""
_FRAME = re.compile(r'^(.*?)\bFile "(.+?)", line (\d{1,9})(?:, in (.+))?$')
"""A frame, with what a logger or an exception group writes before it."""
_BOXED_FRAME = re.compile(r"^[│|]\s*(\S+\.py):(\d{1,9}) in (\S+)")
"""A frame as rich prints it."""
_NOTEBOOK_FRAME = re.compile(
    r"^(?:File (.+?):(\d{1,9})(?:, in (.+?)(?:\(.*)?)?|(Cell In ?\[\d+\]),? line (\d{1,9}).*)$"
)
"""A frame as IPython prints it."""
_MARKED_LINE = re.compile(r"^(?:-+> *\d+|[│|]\s*❱\s*\d+\s*[│|]?)\s*(.*?)\s*[│|]?$")
"""The line of a frame, as IPython and rich mark it."""
_TRACEBACK = "Traceback (most recent call last)"
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
    memory = MemoryLines()
    for number, line in enumerate(_ANSI.sub("", text).replace("\r", "\n").split("\n")):
        rank, rest = _without_prefix(line)
        by_rank.setdefault(rank, []).append((number, rest))
        if not kind_of(rest):
            memory.add(rank, rest)
    numbered = [failure for rank, lines in by_rank.items() for failure in _failures(rank, lines)]
    order = sorted(numbered, key=lambda each: (each.failure.last_step is not None, each.line))
    failures = _essential([each.failure for each in order])
    over_steps = memory.over_steps()
    if not failures and over_steps.readings < 2:
        return None
    short = sum(len(lines) for lines in by_rank.values()) <= 3
    return Evidence(
        kind="message" if short else "log",
        failures=failures,
        growth=over_steps.growth,
        spike=over_steps.spike,
        readings=over_steps.readings,
        notes=over_steps.notes,
    )


def _without_prefix(line: str) -> tuple[int | None, str]:
    """The rank and the rest of a line; a launcher and a logger may both write a prefix."""
    rank: int | None = None
    while (match := _PREFIX.match(line)) is not None:
        rank = int(next(group for group in match.groups() if group is not None))
        line = line[match.end() :]
    return rank, line


def _failures(rank: int | None, lines: Sequence[Numbered]) -> list[_LocatedFailure]:
    """Every failure in the lines of one rank, with the traceback above it and the last step before it."""
    failures: list[_LocatedFailure] = []
    frames: list[Frame] = []
    step: int | None = None
    for index, (number, line) in enumerate(lines):
        if _TRACEBACK in line:
            frames = []
        frame = _frame(lines, index)
        if frame is not None:
            frames.append(frame)
            continue
        kind = kind_of(line)
        if kind is None:
            named = step_of(line)
            step = step if named is None else named
            continue
        failure = read_message(_message(lines, index), kind)
        failures.append(
            _LocatedFailure(line=number, failure=replace(failure, rank=rank, frames=tuple(frames), step=step))
        )
        frames = []
    return [_with_last_step(each, step) for each in failures]


def _with_last_step(located: _LocatedFailure, last: int | None) -> _LocatedFailure:
    """The failure, and the last step after it where the run went on."""
    failure = located.failure
    if last is None or last <= (failure.step if failure.step is not None else -1):
        return located
    return replace(located, failure=replace(failure, last_step=last))


def _frame(lines: Sequence[Numbered], index: int) -> Frame | None:
    line = lines[index][1]
    below = lines[index + 1][1] if index + 1 < len(lines) else ""
    match = _FRAME.match(line)
    if match is not None:
        text = below[len(match[1]) :].strip() if _logged_alike(match[1], below) else below.strip()
        is_source = bool(text) and not _FRAME.match(below) and not kind_of(text)
        return Frame(file=match[2], line=int(match[3]), function=match[4] or "", text=text if is_source else "")
    match = _BOXED_FRAME.match(line) or _NOTEBOOK_FRAME.match(line)
    if match is None:
        return None
    marked = (_MARKED_LINE.match(text) for _, text in lines[index + 1 : index + _MESSAGE_LINES])
    text = next((each[1] for each in marked if each is not None), "")
    file, number, function, cell, cell_line = [each or "" for each in (*match.groups(), "", "")[:5]]
    return Frame(file=file or cell, line=int(number or cell_line), function=function or "<module>", text=text)


def _logged_alike(prefix: str, line: str) -> bool:
    """Whether a line begins as the one above it, digits of a time aside."""
    digits = re.compile(r"\d")
    return digits.sub("0", line[: len(prefix)]) == digits.sub("0", prefix)


def _message(lines: Sequence[Numbered], index: int) -> str:
    """The message that begins at this line; a pasted one may be wrapped."""
    parts = [lines[index][1]]
    for _, line in lines[index + 1 : index + _MESSAGE_LINES]:
        if not line.strip() or kind_of(line) or _TRACEBACK in line or _FRAME.match(line):
            break
        parts.append(line)
    return " ".join(part.strip() for part in parts) if len(parts) > 1 else parts[0]


def _essential(failures: Sequence[MemoryFailure]) -> tuple[MemoryFailure, ...]:
    """The failures without repeats, and without the endings of processes that an allocator's refusal explains."""
    seen: dict[tuple[object, ...], MemoryFailure] = {}
    for failure in failures:
        key = (failure.rank, failure.allocator, failure.requested, failure.free, failure.allocated)
        if key not in seen or (failure.frames and not seen[key].frames and failure.last_step == seen[key].last_step):
            seen[key] = failure
    distinct = list(seen.values())
    with_figures = [failure for failure in distinct if failure.allocator != "host" or failure.allocated is not None]
    numbered = [failure for failure in with_figures if failure.requested is not None]
    return tuple(
        failure
        for failure in with_figures or distinct
        if failure.requested is not None or not any(other.rank == failure.rank for other in numbered)
    )
