"""The card's allocator while the script runs: answers the memory queries of ``torch.cuda``, and raises out-of-memory
errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from memfit.device.virtual.card_rules import note_fact
from memfit.replay.block_pool import FREE, LIVE
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.errors import OutOfMemory
from memfit.sizes import format_size

_STATES = {LIVE: "active_allocated", FREE: "inactive"}


class LiveAllocator:
    """Feeds a caching allocator with each event, and counts as PyTorch does.

    Args:
        capacity: the most bytes that it may reserve; None: no limit.
        total: bytes of the card, for ``mem_get_info``.
        context: bytes of the card that the CUDA context takes.
        failed: called with the bytes of a request that does not fit, before the error is raised.
    """

    def __init__(self, capacity: int | None, total: int, context: int, failed: Callable[[int], None]) -> None:
        self.total, self._context = total, context
        self._allocator = CachingAllocator(capacity)
        self._failed = failed
        self.ooms = 0

    def malloc(self, storage: int, nbytes: int, stream: int = 0) -> None:
        """Raises:
        torch.OutOfMemoryError: it does not fit.
        """
        try:
            self._allocator.malloc(storage, nbytes, stream)
        except OutOfMemory:
            self.ooms += 1
            self._failed(nbytes)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_size(nbytes)}. GPU 0 has a total capacity of "
                f"{format_size(self.total)} of which {format_size(self.unreserved)} is free. Of the allocated memory "
                f"{format_size(self._allocator.allocated)} is allocated by PyTorch, and "
                f"{format_size(self._allocator.reserved - self._allocator.allocated)} is reserved by PyTorch but "
                "unallocated."
            ) from None

    def free(self, storage: int) -> None:
        self._allocator.free(storage)

    def empty_cache(self) -> None:
        self._allocator.empty_cache()

    @property
    def unreserved(self) -> int:
        """Bytes of the card that are not taken."""
        note_fact("memory_bytes")
        return max(self.total - self._context - self._allocator.reserved, 0)

    def answers(self) -> dict[str, Callable[..., Any]]:
        """Replacements for the functions of ``torch.cuda`` and ``torch.cuda.memory``."""
        allocator = self._allocator

        def asked(value: Callable[[], Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: value()

        return {
            "memory_allocated": asked(lambda: allocator.allocated),
            "max_memory_allocated": asked(lambda: allocator.peak_allocated),
            "memory_reserved": asked(lambda: allocator.reserved),
            "memory_cached": asked(lambda: allocator.reserved),
            "max_memory_reserved": asked(lambda: allocator.peak_reserved),
            "max_memory_cached": asked(lambda: allocator.peak_reserved),
            "reset_peak_memory_stats": asked(allocator.reset_peaks),
            "reset_max_memory_allocated": asked(allocator.reset_peaks),
            "reset_max_memory_cached": asked(allocator.reset_peaks),
            "mem_get_info": asked(lambda: (self.unreserved, self.total)),
            "memory_stats": asked(self._stats),
            "memory_stats_as_nested_dict": asked(self._nested_stats),
            "memory_summary": asked(self._summary),
            "memory_snapshot": asked(self._snapshot),
        }

    def _stats(self) -> dict[str, int]:
        allocator = self._allocator
        numbers = {
            "allocated_bytes.all": (allocator.allocated, allocator.peak_allocated),
            "active_bytes.all": (allocator.allocated, allocator.peak_allocated),
            "requested_bytes.all": (allocator.requested, allocator.peak_requested),
            "reserved_bytes.all": (allocator.reserved, allocator.peak_reserved),
        }
        stats: dict[str, int] = defaultdict(int)
        for name, (current, peak) in numbers.items():
            stats[f"{name}.current"], stats[f"{name}.peak"] = current, peak
        for name, count in self._counts().items():
            stats[f"{name}.current"] = count
        stats["num_alloc_retries"], stats["num_ooms"] = allocator.retries, self.ooms
        return stats

    def _counts(self) -> dict[str, int]:
        """The present segments and blocks of each pool."""
        counts: dict[str, int] = defaultdict(int)
        for run in self._allocator.segments():
            live = sum(block.state == LIVE for block in run)
            free = sum(block.state == FREE for block in run) if len(run) > 1 else 0
            for pool in ("all", "small_pool" if run[0].pool.is_small else "large_pool"):
                counts[f"segment.{pool}"] += 1
                counts[f"allocation.{pool}"] += live
                counts[f"active.{pool}"] += live
                counts[f"inactive_split.{pool}"] += free
        return counts

    def _nested_stats(self) -> dict[str, Any]:
        """The same numbers as nested dictionaries, one level for each part of a name."""
        nested: dict[str, Any] = {}
        for name, value in self._stats().items():
            *path, last = name.split(".")
            inside = nested
            for part in path:
                inside = inside.setdefault(part, {})
            inside[last] = value
        return nested

    def _summary(self) -> str:
        rows = [f"{name:40s} {value}" for name, value in self._stats().items()]
        return "\n".join(["PyTorch CUDA memory summary (virtual device)", *rows])

    def _snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "device": 0, "address": run[0].addr, "total_size": sum(block.size for block in run),
                "allocated_size": sum(block.size for block in run if block.state == LIVE), "stream": 0,
                "segment_type": "small" if run[0].pool.is_small else "large",
                "blocks": [{"size": block.size, "state": _STATES[block.state]} for block in run],
            }
            for run in self._allocator.segments()
        ]  # fmt: skip
