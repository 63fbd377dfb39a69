"""Reads memory fast enough for every step: this process's resident bytes, its children's, and a card's allocator."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import torch

PAGE = os.sysconf("SC_PAGE_SIZE")


class HostMemory:
    """Resident bytes of this process without pages of files, from a file that stays open."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)

    def resident(self) -> int:
        """Bytes now."""
        _, resident, shared, *_ = os.pread(self._file, 128, 0).split()
        return (int(resident) - int(shared)) * PAGE

    def close(self) -> None:
        """Closes the file. It can be called again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def children_bytes() -> int:
    """Resident bytes of this process's workers, such as those of a data loader, without pages of files."""
    total = 0
    for child in multiprocessing.active_children():
        try:
            _, resident, shared, *_ = Path(f"/proc/{child.pid}/statm").read_bytes().split()
        except (OSError, ValueError):
            continue
        total += (int(resident) - int(shared)) * PAGE
    return total


class CardMemory:
    """A card's allocator: bytes now, and the largest so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        self._context = total - free - torch.cuda.memory_reserved(device)

    def read(self) -> dict[str, int]:
        """Bytes now and at the peak. The process's are the allocator's and what it held beside it at the start."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "allocated_bytes": allocated["current"],
            "peak_allocated_bytes": allocated["peak"],
            "reserved_bytes": reserved["current"],
            "process_bytes": reserved["peak"] + self._context,
            "allocator_retries": stats.get("num_alloc_retries", 0),
        }
