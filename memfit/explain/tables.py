"""Reads tables: torch.cuda.memory_summary(), nvidia-smi's own and its CSV."""

from __future__ import annotations

import csv
import re
from typing import Any

from memfit.explain.evidence import SIZE, AllocatorState, DeviceUse, Evidence, parse_size

_ROW = re.compile(r"^\|\s*(.+?)\s*\|(.+)\|\s*$")
_OLD_TITLE = re.compile(r"PyTorch (?:CUDA|XPU|HIP)? ?memory summary, device ID (\d+)")


def read_memory_summary(text: str) -> Evidence | None:
    """What ``torch.cuda.memory_summary()`` printed, full or abbreviated; None where the text holds none."""
    title = _OLD_TITLE.search(text)
    if title is None:
        return None
    rows: dict[str, list[int]] = {}
    for line in text[title.start() :].splitlines():
        match = _ROW.match(line)
        if match is None:
            continue
        sizes = [parse_size(number, unit) for number, unit in re.findall(SIZE, match[2])]
        if sizes:
            rows.setdefault(match[1].strip(), sizes)
    reserved, allocated = rows.get("GPU reserved memory"), rows.get("Allocated memory")
    if not reserved or not allocated:
        return None
    counts = re.search(r"CUDA OOMs:\s*(\d+)\s*\|\s*cudaMalloc retries:\s*(\d+)", text)
    requested, split = rows.get("Requested memory"), rows.get("Non-releasable memory")
    state = AllocatorState(
        device=int(title[1]),
        allocated=allocated[0],
        reserved=reserved[0],
        peak_allocated=allocated[1] if len(allocated) > 1 else None,
        peak_reserved=reserved[1] if len(reserved) > 1 else None,
        requested=requested[0] if requested else None,
        releasable=max(reserved[0] - allocated[0] - split[0], 0) if split else None,
        ooms=int(counts[1]) if counts else None,
        retries=int(counts[2]) if counts else None,
    )
    return Evidence(kind="memory summary", state=state)


def read_nvidia_smi(text: str) -> Evidence | None:
    """What nvidia-smi printed, as its table or as CSV; None where the text holds neither."""
    devices = _table(text) or _csv(text)
    return Evidence(kind="nvidia-smi", devices=tuple(devices)) if devices else None


_CARD = re.compile(r"^\|\s*(\d+)\s+([A-Za-z].*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)?\s*\|")
_USED = re.compile(r"(\d+)\s?MiB\s*/\s*(\d+)\s?MiB")
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(?:\S+\s+\S+\s+)?(\d+)\s+([CGM](?:\+[CG])?)\s+(.+?)\s+(?:(\d+)\s?MiB|N/A)\s*\|")


def _table(text: str) -> list[DeviceUse]:
    cards: dict[int, dict[str, Any]] = {}
    current: int | None = None
    for line in text.splitlines():
        process = _PROCESS.match(line)
        if process is not None and int(process[1]) in cards:
            size = int(process[5]) << 20 if process[5] else None
            cards[int(process[1])]["processes"].append((int(process[2]), process[4], size))
            continue
        card = _CARD.match(line)
        if card is not None:
            current = int(card[1])
            cards.setdefault(current, {"name": card[2].strip(), "processes": []})
        used = _USED.search(line)
        if used is not None and current is not None:
            cards[current].setdefault("used", int(used[1]) << 20)
            cards[current].setdefault("total", int(used[2]) << 20)
    return [
        DeviceUse(
            index=index, name=card["name"], used=card["used"], total=card["total"], processes=tuple(card["processes"])
        )
        for index, card in cards.items()
        if "used" in card
    ]


def _csv(text: str) -> list[DeviceUse]:
    """Rows of ``nvidia-smi --query-gpu=... --format=csv`` that name memory.used and memory.total."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    header = next((row for row in rows if any(cell.startswith("memory.used") for cell in row)), None)
    if header is None:
        return []
    names = [cell.partition(" [")[0] for cell in header]
    if "memory.total" not in names:
        return []
    devices: list[DeviceUse] = []
    for row in rows[rows.index(header) + 1 :]:
        cells = dict(zip(names, row, strict=False))
        sizes = [re.match(r"(\d+)(?:\s?MiB)?$", cells.get(name, "")) for name in ("memory.used", "memory.total")]
        if sizes[0] is None or sizes[1] is None:
            continue
        used, total = (int(size[1]) << 20 for size in sizes if size)
        index = cells.get("index", "")
        number = int(index) if index.isdecimal() else len(devices)
        devices.append(DeviceUse(index=number, name=cells.get("name", ""), used=used, total=total))
    return devices
