"""Traces that PyTorch's own CUDA allocator answered (bench/allocator_oracle), replayed: every state equal.

A state is the address given, and allocated, reserved and requested bytes and retries, after each event. In the files
named falling, the device gave each segment an address below those before, as a driver for Linux does; where torch takes
the oldest of equal blocks all the same, addresses are left out.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.replay.allocator_config import AllocatorConfig, takes_youngest
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.errors import OutOfMemory

FILES = sorted(Path(__file__).parent.glob("torch_*_allocator*.jsonl"))
RECORDED = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]


def _name(case: dict[str, Any]) -> str:
    order = "-falling" if case["falling"] else ""
    return f"torch-{case['torch']}{order}-{case['settings'] or 'default'}-{case['sha256'][:6]}"


@pytest.mark.parametrize("case", RECORDED, ids=_name)
def test_every_state_is_the_one_pytorch_reached(case: dict[str, Any]) -> None:
    youngest = takes_youngest(case["torch"])
    config = replace(AllocatorConfig.parse(case["settings"]), youngest_first=youngest)
    allowed = None if case["fraction"] is None else int(case["fraction"] * case["total"])
    allocator = CachingAllocator(case["capacity"], config, allowed=allowed)
    states = []
    for op in case["ops"].split():
        address = 0
        if op == "e":
            allocator.empty_cache()
        elif op.startswith("-"):
            allocator.free(int(op[1:]))
        else:
            storage, nbytes, stream = (int(number) for number in op.replace("@", ":").split(":"))
            try:
                allocator.malloc(storage, nbytes, stream)
                address = allocator.address(storage)
            except OutOfMemory:
                pass
        if case["falling"] and not youngest:
            address = int(address != 0)
        states.append((address, allocator.allocated, allocator.reserved, allocator.requested, allocator.retries))
    assert list(states[-1]) == case["last"]
    assert hashlib.sha256(repr(states).encode()).hexdigest() == case["sha256"]


def test_the_recorded_traces_reach_every_rule() -> None:
    settings = {case["settings"].split(":")[0] for case in RECORDED}
    assert settings == {
        "", "expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions",
        "large_segment_size_mb",
    }  # fmt: skip
    assert sum(case["last"][4] for case in RECORDED) > 100, "retries"
    assert sum(case["fraction"] is not None for case in RECORDED) >= 5
    assert {(case["torch"][:4], case["falling"]) for case in RECORDED} == {
        ("2.11", True),
        ("2.13", True),
        ("2.13", False),
    }
