"""A predicted timeline as the pickle that torch.cuda.memory._dump_snapshot writes: pytorch.org/memory_viz opens it.

Source of the form: torch/cuda/memory.py (_snapshot) and torch/csrc/cuda/memory_snapshot.cpp of torch 2.13. A replay
knows the order of events and not their time: ``time_us`` counts the trace's events. Frames name the operator and its
module in place of source lines, innermost first, then what the storage holds, and the part and phase it happened in.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from memfit.atomic_file import open_atomic
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.block_pool import LIVE, Block, History
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.cudnn_workspaces import optional_storages
from memfit.replay.errors import OutOfMemory

Frames = list[dict[str, Any]]


def write_snapshot(
    path: Path, trace: Trace, capacity: int | None = None, config: AllocatorConfig | None = None
) -> None:
    """Replays a trace and writes its snapshot; ``capacity`` and ``config`` as CachingAllocator takes them."""
    with open_atomic(path) as file:
        pickle.dump(snapshot(trace, capacity, config), file, protocol=4)


def snapshot(trace: Trace, capacity: int | None = None, config: AllocatorConfig | None = None) -> dict[str, Any]:
    """The snapshot after the last event, or after the first request that the device has no room for."""
    history: History = []
    allocator = CachingAllocator(capacity, config, history=history)
    frames = _Frames(trace)
    entries: list[dict[str, Any]] = []
    optional, missing = optional_storages(trace), set[int]()
    for phase, start, end in trace.phases:
        for event in range(start, end):
            if trace.kind[event] == FREE and int(trace.storage[event]) in missing:
                continue
            failed = _apply(allocator, trace, event)
            if failed and int(trace.storage[event]) in optional:
                missing.add(int(trace.storage[event]))
                failed = False
            here = frames.of(event, phase)
            for row in history:
                entries.extend(_entries(row, event, here))
            history.clear()
            if failed:
                return _snapshot(allocator, entries, frames)
    return _snapshot(allocator, entries, frames)


def _apply(allocator: CachingAllocator, trace: Trace, event: int) -> bool:
    """One event of the trace; True where the device had no room for it."""
    kind, storage = trace.kind[event], int(trace.storage[event])
    if kind == ALLOCATE:
        try:
            allocator.malloc(storage, int(trace.nbytes[storage]), int(trace.stream[storage]))
        except OutOfMemory:
            return True
    elif kind == FREE:
        allocator.free(storage)
    else:
        allocator.empty_cache()
    return False


class _Frames:
    """The frames of each event, made once for each operator, category and phase, and those of each live storage."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.allocated: dict[int, Frames] = {}
        self._made: dict[tuple[int, str, str], Frames] = {}

    def of(self, event: int, phase: str) -> Frames:
        storage, operator = int(self.trace.storage[event]), int(self.trace.operator[event])
        category = CATEGORIES[self.trace.category[storage]] if storage >= 0 else ""
        frames = self._made.get((operator, category, phase))
        if frames is None:
            frames = self._made[operator, category, phase] = self._make(operator, category, phase)
        if self.trace.kind[event] == ALLOCATE:
            self.allocated[storage] = frames
        return frames

    def _make(self, operator: int, category: str, phase: str) -> Frames:
        trace = self.trace
        name = trace.names[trace.operator_name[operator]]
        module = trace.modules[trace.operator_module[operator]]
        part = trace.parts[trace.operator_part[operator]]
        rows = [(module, name), (module, category), (part, phase)]
        return [{"filename": filename, "line": 0, "name": name} for filename, name in rows if name]


def _entries(row: tuple[str, int, int, int, int], time: int, frames: Frames) -> list[dict[str, Any]]:
    action, address, size, stream, _ = row
    key = "device_free" if action == "oom" else "addr"
    actions = ("free_requested", "free_completed") if action == "free" else (action,)
    common = {key: address, "size": size, "stream": stream, "time_us": time, "pool_id": (0, 0), "frames": frames}
    return [{"action": name, **common} for name in actions]


def _snapshot(allocator: CachingAllocator, entries: list[dict[str, Any]], frames: _Frames) -> dict[str, Any]:
    config = allocator.config
    return {
        "segments": [_segment(run, frames) for run in allocator.segments()],
        "device_traces": [entries],
        "external_annotations": [],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1 if config.max_split_size is None else config.max_split_size,
            "garbage_collection_threshold": config.garbage_collection_threshold,
            "expandable_segments": config.expandable_segments,
            "roundup_power2_divisions": {str(1 << k): step for k, step in enumerate(config.roundup_power2_divisions)},
        },
    }


def _segment(run: list[Block], frames: _Frames) -> dict[str, Any]:
    pool, live = run[0].pool, [block for block in run if block.state == LIVE]
    allocated = sum(block.size for block in live)
    return {
        "device": 0, "address": run[0].addr, "total_size": sum(block.size for block in run),
        "allocated_size": allocated, "active_size": allocated, "requested_size": sum(block.requested for block in live),
        "stream": pool.stream, "segment_type": "small" if pool.is_small else "large", "segment_pool_id": (0, 0),
        "is_expandable": run[0].range is not None, "frames": [], "blocks": [_block(block, frames) for block in run],
    }  # fmt: skip


def _block(block: Block, frames: _Frames) -> dict[str, Any]:
    live = block.state == LIVE
    return {
        "address": block.addr, "size": block.size, "requested_size": block.requested if live else 0,
        "state": "active_allocated" if live else "inactive",
        "frames": frames.allocated[block.storage] if live else [],
    }  # fmt: skip
