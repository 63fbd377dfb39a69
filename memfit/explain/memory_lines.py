"""Memory that a log prints with its steps, in the words of its logger: one series for each rank and name.

Forms: ``memory: 30.51GiB(38%)`` (torchtitan), ``MA 5.5 GB Max_MA 6.0 GB`` (DeepSpeed), ``memory (MB) | allocated:
12000.0`` (Megatron-LM), ``max_mem: 8000M`` (detectron2), ``memory: 5200`` (mmdetection), ``max mem: 4000``
(torchvision's references), ``'memory/max_active (GiB)': 10.2`` (axolotl), ``peak_memory_alloc:14.9`` (torchtune),
``gpu_mem_gb=10.3``, ``memory/peak_allocated_mem: 9.1`` (Composer) and the column GPU_mem of Ultralytics.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from memfit.explain.evidence import StepGrowth, parse_size
from memfit.explain.growth import growth_of, spike_of

_UNIT = r"[KMGT]i?B|bytes|[KMGT]|B"
_KEY = re.compile(
    r"(?<![\w/.-])((?:(?:max|peak|gpu|cuda)[ _])*"
    r"(?:[\w/.-]*(?:mem|memory|allocated|reserved|vram)(?![a-z])[\w/-]*(?:[ _](?:allocated|reserved|used|usage))?"
    r"|(?:Max_)?[MC]A)"
    rf"(?:\s?\((?:{_UNIT})\))?)"
    rf"['\"]?\s*[:=]?\s*(\d[\d,]{{0,20}}(?:\.\d{{1,18}})?)\s?({_UNIT})?(?![\w.%])(?!\s%)(?:\s?/\s?\d[\d.,]*\s?({_UNIT})\b)?",
    re.IGNORECASE,
)
"""Name, number, unit of the number, unit of the whole that the number is a part of."""
_WITHOUT_UNIT = re.compile(
    r"(?:(?:max|peak|gpu|cuda)[ _])*mem(?:ory)?(?:[ _](?:allocated|reserved|used|usage|active|alloc))?"
    r"|.*(?:allocated|active|reserved|inactive)_mem",
    re.IGNORECASE,
)
"""Names that loggers write without a unit."""
_NO_READING = re.compile(r"total|capacity|limit|budget|free|available|percent|frac|util|pct|predict", re.IGNORECASE)
_UNIT_IN_NAME = re.compile(rf"\((?P<a>{_UNIT})\)|[_/](?P<b>[kmgt]i?b|bytes)$", re.IGNORECASE)
_UNIT_IN_LINE = re.compile(r"\bmemory \(([KMGT]i?B)\)", re.IGNORECASE)
_ULTRALYTICS = re.compile(r"^\s*(\d{1,9})/\d+\s+(\d{1,9}(?:\.\d{1,9})?)G\s")
_STEP = re.compile(
    r"\b(?:global_step|step|iter(?:ation)?|it|batch)\b['\"]?[\s:=#\[(]*(\d{1,15})\b|\|\s*(\d{1,15})/\d+\s*\["
    r"|\bafter (\d{1,15}) iterations\b",
    re.IGNORECASE,
)
_EPOCH_AND_STEP = re.compile(r"\[(\d{1,9})\]\s*\[\s*(\d{1,9})/(\d{1,9})\]")
"""mmdetection and torchvision's references: ``Epoch [1][50/7330]``."""
_MAXIMUM = re.compile(r"max|peak", re.IGNORECASE)
LONGEST = 4000
"""Characters of a line that are read."""
LARGEST_GIB, LARGEST_MIB = 512, 1 << 22
"""A number without a unit is taken for GiB below the first, for MiB below the second, and for bytes from there on."""


@dataclass(frozen=True, kw_only=True)
class LogGrowth:
    """What the memory of a log does over its steps."""

    readings: int = 0
    growth: StepGrowth | None = None
    spike: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Series:
    steps: list[int | None] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    guessed: str | None = None
    """The unit that was taken, where the log writes none."""

    def by_step(self) -> tuple[list[tuple[int, int]], str]:
        """(step, most bytes) by the log's own steps where these only rise, else by the number of the reading."""
        steps = [step for step in self.steps if step is not None]
        if len(steps) < len(self.steps) or any(after < before for before, after in itertools.pairwise(steps)):
            return [*enumerate(self.bytes)], "reading"
        most: dict[int, int] = {}
        for step, nbytes in zip(steps, self.bytes, strict=True):
            most[step] = max(nbytes, most.get(step, 0))
        return [*most.items()], "step"


class MemoryLines:
    """Collects the readings of a log, line by line."""

    def __init__(self) -> None:
        self._series: dict[tuple[int | None, str], _Series] = {}
        self._steps: dict[int | None, int] = {}

    def add(self, rank: int | None, line: str) -> None:
        """Reads a line. A reading without a step belongs to the last one that its rank named."""
        line = line[:LONGEST]
        step = step_of(line)
        if step is not None:
            self._steps[rank] = step
        row = _ULTRALYTICS.match(line)
        if row is not None:
            self._note(rank, "GPU_mem", int(row[1]), parse_size(row[2], "G"), None)
            return
        for name, number, unit, whole in _KEY.findall(line):
            key = name.strip().lower()
            given = unit or whole or _unit_of(name, line)
            if _NO_READING.search(key) or not (given or _WITHOUT_UNIT.fullmatch(key)):
                continue
            value = number.replace(",", "")
            guessed = None if given else _likely_unit(float(value))
            self._note(rank, key, self._steps.get(rank), parse_size(value, given or guessed or "B"), guessed)

    def _note(self, rank: int | None, name: str, step: int | None, nbytes: int, guessed: str | None) -> None:
        series = self._series.setdefault((rank, name), _Series())
        series.steps.append(step)
        series.bytes.append(nbytes)
        series.guessed = series.guessed or guessed

    def over_steps(self) -> LogGrowth:
        """Growth of the series that shows it, else what the longest one says; bytes now come before maxima so far."""
        order = sorted(self._series, key=lambda key: (bool(_MAXIMUM.search(key[1])), -len(self._series[key].bytes)))
        grown = {key: _growth(key[1], self._series[key]) for key in order}
        chosen = next((key for key in order if grown[key]), max(order, key=self._length, default=None))
        if chosen is None or self._length(chosen) < 2:
            return LogGrowth()
        series = self._series[chosen]
        readings, unit = series.by_step()
        notes = [f"The log writes {chosen[1]!r} without a unit: taken for {series.guessed}B."] if series.guessed else []
        return LogGrowth(
            readings=len(readings), growth=grown[chosen], spike=spike_of(readings, unit), notes=tuple(notes)
        )

    def _length(self, key: tuple[int | None, str]) -> int:
        return len(self._series[key].bytes)


def step_of(line: str) -> int | None:
    """The step that a line names; None where it names none."""
    both = _EPOCH_AND_STEP.search(line)
    if both is not None:
        return int(both[1]) * int(both[3]) + int(both[2])
    match = _STEP.search(line)
    return None if match is None else int(next(group for group in match.groups() if group is not None))


def _growth(name: str, series: _Series) -> StepGrowth | None:
    """Growth of a series. A maximum so far never falls: it shows a leak only where it rises in most readings."""
    readings, unit = series.by_step()
    values = [nbytes for _, nbytes in readings]
    rises = sum(after > before for before, after in itertools.pairwise(values))
    never_falls = all(after >= before for before, after in itertools.pairwise(values))
    if _MAXIMUM.search(name) and never_falls and 2 * rises < len(values) - 1:
        return None
    return growth_of(readings, unit)


def _unit_of(name: str, line: str) -> str | None:
    inside = _UNIT_IN_NAME.search(name)
    if inside is not None:
        return inside["a"] or inside["b"]
    header = _UNIT_IN_LINE.search(line)
    return header[1] if header is not None else None


def _likely_unit(number: float) -> str:
    return "Gi" if number < LARGEST_GIB else "Mi" if number < LARGEST_MIB else ""
