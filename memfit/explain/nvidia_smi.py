"""Reads what nvidia-smi prints: its table (with MIG instances), ``-q``, and the CSV of cards.

Forms: drivers 418 to 570, whose tables differ in the columns GI and CI, in widths and in the line of MIG's mode.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from memfit.explain.evidence import DeviceUse, Evidence

_CARD = re.compile(r"^\|\s*(\d{1,15})\s+([A-Za-z].*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)?\s*\|")
_USED = re.compile(r"(\d{1,15})\s?MiB\s*/\s*(\d{1,15})\s?MiB")
_INSTANCE = re.compile(r"^\|\s*(\d{1,15})\s+(\d{1,15})\s+\d+\s+\d+\s*\|\s*(\d{1,15})\s?MiB\s*/\s*(\d{1,15})\s?MiB")
_PROCESS = re.compile(
    r"^\|\s*(\d{1,15})\s+(?:(\S+)\s+\S+\s+)?(\d{1,15})\s+([CGM](?:\+[CG])?)\s+(.+?)\s+(?:(\d{1,15})\s?MiB|N/A)\s*\|"
)
LONGEST = 1000
"""Characters of a line of CSV."""
_FIELD = re.compile(r"^(\s*)([A-Z][\w ./]*?)\s*: (.*)$")


@dataclass(kw_only=True)
class _Card:
    index: int
    name: str = ""
    used: int | None = None
    total: int | None = None
    processes: list[tuple[int, str, int | None]] = field(default_factory=list)


def read_nvidia_smi(text: str) -> Evidence | None:
    """What nvidia-smi printed; None where the text holds none of its forms."""
    cards = [*_table(text)] or [*_query(text)] or [*_csv(text)]
    devices = tuple(
        DeviceUse(index=c.index, name=c.name, used=c.used, total=c.total, processes=tuple(c.processes))
        for c in cards
        if c.used is not None and c.total is not None
    )
    return Evidence(kind="nvidia-smi", devices=devices) if devices else None


def _table(text: str) -> Iterator[_Card]:
    """The cards; of one that MIG divides, its instances."""
    cards: dict[tuple[int, str], _Card] = {}
    current: _Card | None = None
    for line in text.splitlines():
        process, instance = _PROCESS.match(line), _INSTANCE.match(line)
        if process is not None:
            card = cards.get((int(process[1]), process[2] or "")) or cards.get((int(process[1]), ""))
            if card is not None:
                card.processes.append((int(process[3]), process[5], _mib(process[6])))
            continue
        if instance is not None:
            whole = cards.get((int(instance[1]), ""))
            name = f"{whole.name if whole is not None else ''} MIG instance {instance[2]}".strip()
            cards[int(instance[1]), instance[2]] = _Card(
                index=int(instance[1]), name=name, used=_mib(instance[3]), total=_mib(instance[4])
            )
            current = None
            continue
        card_line, used = _CARD.match(line), _USED.search(line)
        if card_line is not None:
            current = cards.setdefault(
                (int(card_line[1]), ""), _Card(index=int(card_line[1]), name=card_line[2].strip())
            )
        if used is not None and current is not None and current.used is None:
            current.used, current.total = _mib(used[1]), _mib(used[2])
    divided = {index for index, instance in cards if instance}
    yield from (card for (index, instance), card in cards.items() if instance or index not in divided)


def _query(text: str) -> Iterator[_Card]:
    """The cards of ``nvidia-smi -q``, whose fields are indented below their heading."""
    card: _Card | None = None
    heading, number, name, cards = "", 0, "", 0
    for line in text.splitlines():
        if re.match(r"^GPU [0-9A-F]{8}:", line):
            if card is not None:
                yield card
            card, cards = _Card(index=cards), cards + 1
            continue
        match = _FIELD.match(line)
        if match is None:
            heading = line.strip() or heading
            continue
        if card is None:
            continue
        value = match[3].strip()
        if match[2] == "Product Name":
            card.name = value
        elif heading == "FB Memory Usage" and match[2] in ("Used", "Total"):
            size = _mib(value.removesuffix(" MiB"))
            card.used, card.total = (size, card.total) if match[2] == "Used" else (card.used, size)
        elif match[2] == "Process ID":
            number = int(value) if value.isdecimal() and len(value) < 16 else 0
        elif match[2] == "Name" and number:
            name = value
        elif match[2] == "Used GPU Memory" and number:
            card.processes.append((number, name, _mib(value.removesuffix(" MiB"))))
            number = 0
    if card is not None:
        yield card


def _csv(text: str) -> Iterator[_Card]:
    """Rows of ``--query-gpu=...`` that name memory.used and memory.total."""
    lines = [line for line in text.splitlines() if len(line) < LONGEST]
    begin = next((number for number, line in enumerate(lines) if "memory.used" in line and "," in line), len(lines))
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines[begin:], skipinitialspace=True) if row]
    names = [cell.partition(" [")[0] for cell in rows[0]] if rows else []
    if "memory.used" not in names or "memory.total" not in names:
        return
    for position, row in enumerate(rows[1:]):
        cells = dict(zip(names, row, strict=False))
        index = cells.get("index", "")
        used, total = (_mib(cells.get(name, "").removesuffix(" MiB")) for name in ("memory.used", "memory.total"))
        yield _Card(
            index=int(index) if index.isdecimal() and len(index) < 10 else position,
            name=cells.get("name", ""),
            used=used,
            total=total,
        )


def _mib(number: str | None) -> int | None:
    return int(number) << 20 if number is not None and number.isdecimal() and len(number) < 16 else None
