"""Reads the table of torch.cuda.memory_summary()."""

from __future__ import annotations

import re

from memfit.explain.evidence import SIZE, AllocatorState, Evidence, parse_size

_ROW = re.compile(r"\|\s*([A-Z].+?)\s*\|(.+)\|\s*$")
_TITLE = re.compile(r"PyTorch (?:CUDA|XPU|HIP)? ?memory summary, device ID (\d+)")


def read_memory_summary(text: str, device: int | None = None) -> Evidence | None:
    """What ``torch.cuda.memory_summary()`` printed, full or abbreviated; None where the text holds none.

    Args:
        device: of several summaries, the last one of this device; None: the last one.
    """
    titles = [*_TITLE.finditer(text)]
    title = next((each for each in reversed(titles) if int(each[1]) == device), titles[-1] if titles else None)
    if title is None:
        return None
    end = next((each.start() for each in titles if each.start() > title.start()), len(text))
    table = text[title.start() : end]
    rows: dict[str, list[int]] = {}
    for line in table.splitlines():
        match = _ROW.search(line)
        if match is None:
            continue
        sizes = [parse_size(number, unit) for number, unit in re.findall(SIZE, match[2])]
        if sizes:
            rows.setdefault(match[1].strip(), sizes)
    reserved, allocated = rows.get("GPU reserved memory"), rows.get("Allocated memory")
    if not reserved or not allocated:
        return None
    counts = re.search(r"CUDA OOMs:\s*(\d+)\s*\|\s*cudaMalloc retries:\s*(\d+)", table)
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
