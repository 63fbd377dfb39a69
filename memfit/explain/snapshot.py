"""Reads a memory snapshot of torch.cuda.memory._dump_snapshot(): live blocks, holes, the failed request, growth.

Source of the form: torch/cuda/memory.py (_snapshot) and torch/csrc/cuda/memory_snapshot.cpp. Categories follow from the
Python frames of an allocation; a snapshot without frames (record_memory_history was off) tells sizes and holes alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.events import CATEGORIES
from memfit.explain.evidence import AllocatorState, Evidence, Frame, Holder, MemoryFailure, StepGrowth
from memfit.explain.growth import growth_of
from memfit.explain.plain_pickle import read_plain_pickle

LIVE = frozenset(("active_allocated", "active_awaiting_free", "active_pending_free"))
PARTS = 18
"""Parts of the recorded history whose least live bytes are compared."""
FREED = 0.9
"""History shows several steps where this part of what its first half allocated was freed again."""
_BY_FRAME = (
    ("optimizer", ("torch/optim/",)),
    ("communication", ("torch/distributed/", "deepspeed/runtime/zero")),
    ("gradients", ("torch/autograd/", "torch/_tensor.py:backward", "Engine::evaluate_function")),
    ("parameters", ("module.py:_apply", ":reset_parameters", "module.py:to_empty", ":from_pretrained")),
    ("inputs", ("torch/utils/data/", "pin_memory.py")),
    ("activations", ("module.py:_call_impl", ":forward")),
)
"""The category of an allocation by the first rule that one of its frames meets."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    size: int
    requested: int
    live: bool
    where: str
    category: str


def read_snapshot(path: Path, data: bytes) -> Evidence:
    """What a snapshot says of the device that holds most.

    Raises:
        InputError: a pickle of more than plain containers, or one that is no memory snapshot.
    """
    snapshot = read_plain_pickle(data, str(path))
    write = "write a file of torch.cuda.memory._dump_snapshot()"
    if isinstance(snapshot, list):
        snapshot = {"segments": snapshot, "device_traces": []}
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        raise InputError(str(path), "a pickle without segments, which a memory snapshot has", write)
    try:
        return _read(snapshot)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
        raise InputError(str(path), f"no memory snapshot that torch writes ({type(error).__name__})", write) from None


def _read(snapshot: dict[str, Any]) -> Evidence:
    traces = snapshot.get("device_traces") or []
    device = _largest_device(snapshot["segments"], traces)
    segments = [segment for segment in snapshot["segments"] if int(segment.get("device", 0)) == device]
    entries = traces[device] if device < len(traces) else []
    blocks = [block for segment in segments for block in _blocks(segment)]
    live = [block for block in blocks if block.live]
    state = AllocatorState(
        device=device,
        allocated=sum(block.size for block in live),
        reserved=sum(_size(segment["total_size"]) for segment in segments),
        requested=sum(block.requested or block.size for block in live),
        largest_hole=max((block.size for block in blocks if not block.live), default=0),
        releasable=sum(
            _size(segment["total_size"]) for segment in segments if not any(b.live for b in _blocks(segment))
        ),
        expandable=any(bool(segment.get("is_expandable")) for segment in segments),
        ooms=sum(entry["action"] == "oom" for entry in entries) if entries else None,
    )
    categories: dict[str, int] = defaultdict(int)
    for block in live:
        categories[block.category] += block.size
    growth = _growth(entries, state.allocated)
    return Evidence(
        kind="memory snapshot",
        failures=tuple(_failure(entry, state) for entry in entries if entry["action"] == "oom"),
        state=state,
        alive=_holders(live),
        categories=tuple(sorted(categories.items(), key=lambda item: -item[1])),
        growth=growth,
        notes=() if any(block.where for block in live) else (_NO_FRAMES,),
    )


_NO_FRAMES = (
    "The snapshot has no stack frames: call torch.cuda.memory._record_memory_history() before training to see lines."
)


def _largest_device(segments: Sequence[Any], traces: Sequence[Any]) -> int:
    reserved: dict[int, int] = defaultdict(int)
    for segment in segments:
        reserved[int(segment.get("device", 0))] += _size(segment["total_size"])
    failed = [number for number, entries in enumerate(traces) if any(entry["action"] == "oom" for entry in entries)]
    return failed[0] if failed else max(reserved, key=lambda number: reserved[number], default=0)


def _blocks(segment: dict[str, Any]) -> Iterator[_Block]:
    for block in segment["blocks"]:
        frames = block.get("frames") or _old_frames(block)
        live = block["state"] in LIVE
        where, category = _origin(frames) if live else ("", "")
        yield _Block(
            size=_size(block["size"]), requested=_size(block.get("requested_size", 0)), live=live, where=where,
            category=category,
        )  # fmt: skip


def _size(value: Any) -> int:
    """Bytes.

    Raises:
        ValueError: no number of bytes that a card can have.
    """
    nbytes = int(value)
    if not 0 <= nbytes < 1 << 50:
        raise ValueError(value)
    return nbytes


def _old_frames(block: dict[str, Any]) -> list[Any]:
    """Frames as torch 2.0 wrote them, in a block's history."""
    history = block.get("history") or []
    return list(history[0].get("frames") or []) if history else []


def _origin(frames: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """(line of the person's code or, without one, the innermost frame; category) of an allocation."""
    made = [
        Frame(file=str(frame["filename"]), line=int(frame["line"]), function=str(frame["name"])) for frame in frames
    ]
    named = next((frame.function for frame in made if frame.line == 0 and frame.function in CATEGORIES), None)
    if named is not None:
        return f"{made[0].file} ({made[0].function})", named
    own = next((frame for frame in made if not frame.is_library and frame.line > 0), None)
    shown = own or next((frame for frame in made if frame.line > 0), made[0] if made else None)
    paths = [f"{frame.file}:{frame.function}" for frame in made]
    category = next(
        (name for name, rules in _BY_FRAME if any(rule in path for path in paths for rule in rules)), "unknown"
    )
    return str(shown) if shown else "", category


def _holders(live: Sequence[_Block]) -> tuple[Holder, ...]:
    grouped: dict[tuple[str, str], list[int]] = defaultdict(list)
    for block in live:
        if block.where:
            grouped[block.where, block.category].append(block.size)
    holders = [
        Holder(where=where, category=category, bytes=sum(sizes), blocks=len(sizes))
        for (where, category), sizes in grouped.items()
    ]
    return tuple(sorted(holders, key=lambda holder: -holder.bytes))


def _failure(entry: dict[str, Any], state: AllocatorState) -> MemoryFailure:
    frames = tuple(
        Frame(file=str(frame["filename"]), line=int(frame["line"]), function=str(frame["name"]))
        for frame in reversed(entry.get("frames") or [])
    )
    return MemoryFailure(
        allocator="cuda", message="out of memory", requested=_size(entry["size"]), device=state.device,
        free=_size(entry["device_free"]) if "device_free" in entry else None, allocated=state.allocated,
        unallocated=state.unallocated, frames=frames,
    )  # fmt: skip


def _growth(entries: Sequence[dict[str, Any]], allocated: int) -> StepGrowth | None:
    """Growth of the least live bytes of each part of the history, where that shows several steps."""
    changes = [
        (_size(entry["size"]) if entry["action"] == "alloc" else -_size(entry["size"]), entry)
        for entry in entries
        if entry["action"] in ("alloc", "free_completed")
    ]
    if len(changes) < 4 * PARTS:
        return None
    allocations: dict[int, int] = {}
    first_half = kept = 0
    for index, (size, entry) in enumerate(changes):
        address = int(entry["addr"])
        if size > 0:
            allocations[address] = index
            first_half += size if index < len(changes) // 2 else 0
        else:
            allocations.pop(address, None)
    alive = [changes[index] for index in allocations.values()]
    kept = sum(changes[index][0] for index in allocations.values() if index < len(changes) // 2)
    if not first_half or kept > (1 - FREED) * first_half:
        return None
    live = allocated - sum(size for size, _ in changes)
    readings = []
    for part in range(PARTS):
        least: int | None = None
        for size, _ in changes[part * len(changes) // PARTS : (part + 1) * len(changes) // PARTS]:
            live += size
            least = live if least is None else min(least, live)
        readings.append((part, least or 0))
    return growth_of(readings, "eighteenth of the history", _growing_line(alive, changes))


def _growing_line(alive: Sequence[tuple[int, Any]], changes: Sequence[tuple[int, Any]]) -> str | None:
    """The line of which most bytes that were allocated in the first three quarters are alive."""
    positions = {id(entry): index for index, (_, entry) in enumerate(changes)}
    held: dict[str, int] = defaultdict(int)
    for size, entry in alive:
        if positions[id(entry)] < len(changes) * 3 // 4:
            held[_origin(entry.get("frames") or [])[0]] += size
    held.pop("", None)
    return max(held, key=lambda where: held[where], default=None)
