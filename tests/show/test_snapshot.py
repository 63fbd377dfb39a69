"""A predicted timeline, read by PyTorch's own reader of memory snapshots."""

import base64
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.cuda import _memory_viz

from memfit.events import ALLOCATE, CATEGORIES, EMPTY_CACHE, FREE, Trace
from memfit.replay.allocator_config import AllocatorConfig
from memfit.show.snapshot import snapshot, write_snapshot

MIB = 1 << 20


def trace_of(nbytes: list[int], events: list[int], stream: list[int] | None = None) -> Trace:
    """Events: k allocates storage k - 1, -k frees it, 0 empties the cache; each storage by an operator of its own."""
    kind = [ALLOCATE if e > 0 else FREE if e < 0 else EMPTY_CACHE for e in events]
    storage = [abs(e) - 1 for e in events]
    count = len(nbytes)
    return Trace(
        kind=np.array(kind, np.int8), storage=np.array(storage, np.int32),
        operator=np.array([max(s, 0) for s in storage], np.int32), nbytes=np.array(nbytes, np.int64),
        category=np.array([k % len(CATEGORIES) for k in range(count)], np.uint8),
        stream=np.array(stream or [0] * count, np.uint8), made_by=np.arange(count, dtype=np.int32),
        operator_name=np.arange(count, dtype=np.int32), operator_module=np.zeros(count, np.int32),
        operator_part=np.zeros(count, np.int32), operator_flops=np.zeros(count, np.int64),
        operator_bytes=np.zeros(count, np.int64), names=tuple(f"aten::op{k}" for k in range(count)),
        modules=("unet.down.0",), parts=("forward",), phases=(("setup", 0, 1), ("train", 1, len(events))),
    )  # fmt: skip


@pytest.fixture
def trace() -> Trace:
    return trace_of([3 * MIB, 1000, 5 * MIB, 30 * MIB], [1, 2, 3, -1, 4, -4, 0], stream=[0, 0, 0, 1])


def test_events_are_those_that_pytorch_would_record(trace: Trace) -> None:
    result = snapshot(trace)
    (entries,) = result["device_traces"]
    assert [(e["action"], e["size"], e["stream"], e["time_us"]) for e in entries] == [
        ("segment_alloc", 20 * MIB, 0, 0), ("alloc", 3 * MIB, 0, 0), ("segment_alloc", 2 * MIB, 0, 1),
        ("alloc", 1000, 0, 1), ("alloc", 5 * MIB, 0, 2), ("free_requested", 3 * MIB, 0, 3),
        ("free_completed", 3 * MIB, 0, 3), ("segment_alloc", 30 * MIB, 1, 4), ("alloc", 30 * MIB, 1, 4),
        ("free_requested", 30 * MIB, 1, 5), ("free_completed", 30 * MIB, 1, 5), ("segment_free", 30 * MIB, 1, 6),
    ]  # fmt: skip


def test_frames_name_operator_module_category_part_and_phase(trace: Trace) -> None:
    entries = snapshot(trace)["device_traces"][0]
    assert entries[4]["frames"] == [
        {"filename": "unet.down.0", "line": 0, "name": "aten::op2"},
        {"filename": "unet.down.0", "line": 0, "name": "optimizer"},
        {"filename": "forward", "line": 0, "name": "train"},
    ]


def test_segments_hold_their_blocks(trace: Trace) -> None:
    large, small = snapshot(trace, config=AllocatorConfig(youngest_first=False))["segments"]
    assert (large["total_size"], large["allocated_size"], large["segment_type"]) == (20 * MIB, 5 * MIB, "large")
    assert [(b["state"], b["size"]) for b in large["blocks"]] == [
        ("inactive", 3 * MIB), ("active_allocated", 5 * MIB), ("inactive", 12 * MIB),
    ]  # fmt: skip
    assert (small["segment_type"], small["requested_size"], small["blocks"][0]["size"]) == ("small", 1000, 1024)
    assert large["blocks"][1]["frames"][0]["name"] == "aten::op2"


def read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        result: dict[str, Any] = pickle.load(file)
    return result


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_reader_of_torch_draws_it(trace: Trace, tmp_path: Path, settings: str) -> None:
    path = tmp_path / "predicted.pickle"
    write_snapshot(path, trace, None, AllocatorConfig.parse(settings))
    result = read(path)
    drawn = _memory_viz.trace(result)
    assert drawn.startswith("Device 0 ----------------\n")
    assert "3.0MiB" in drawn
    assert "del " in drawn
    assert "22.0MiB" in _memory_viz.segsum(result), "the two segments that are left"
    for page in (_memory_viz.trace_plot(result), _memory_viz.segment_plot(result)):
        (encoded,) = re.findall(r'"base64": "([^"]+)"', page)
        assert pickle.loads(base64.b64decode(encoded))["device_traces"] == result["device_traces"]


def test_the_first_request_without_room_is_the_last_event(trace: Trace) -> None:
    entries = snapshot(trace, capacity=40 * MIB)["device_traces"][0]
    assert [e["action"] for e in entries].count("oom") == 1
    last = entries[-1]
    assert (last["action"], last["size"], last["device_free"]) == ("oom", 30 * MIB, 18 * MIB)
    assert "OutOfMemoryError # 30.0MiB requested, 18.0MiB free" in _memory_viz.trace(snapshot(trace, 40 * MIB))


def test_the_web_viewer_knows_every_opcode(trace: Trace, tmp_path: Path) -> None:
    """pytorch.org/memory_viz unpickles with a reader of its own (torch/utils/viz/MemoryViz.js): protocols 2 to 4."""
    write_snapshot(tmp_path / "predicted.pickle", trace)
    used = [op.name for op, _, _ in pickletools.genops((tmp_path / "predicted.pickle").read_bytes())]
    assert set(used) <= {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE",
        "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
        "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT",
        "DICT", "SETITEM", "SETITEMS",
    }  # fmt: skip


def test_the_settings_are_in_it(trace: Trace) -> None:
    settings = snapshot(trace, None, AllocatorConfig.parse("max_split_size_mb:64"))["allocator_settings"]
    assert (settings["max_split_size"], settings["expandable_segments"]) == (64 * MIB, False)
    assert snapshot(trace)["allocator_settings"]["max_split_size"] == -1


def test_a_long_timeline_is_small_because_frames_are_shared(tmp_path: Path) -> None:
    events = [sign * k for k in range(1, 5001) for sign in (1, -1)]
    path = tmp_path / "long.pickle"
    write_snapshot(path, trace_of([4096] * 5000, events))
    entries = read(path)["device_traces"][0]
    assert len(entries) == 15001
    assert path.stat().st_size < 3 * MIB
