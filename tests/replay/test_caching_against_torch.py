"""Traces that PyTorch 2.13.0's own CUDA allocator answered (bench/allocator_oracle), replayed: every state equal.

A state is the address given, and allocated, reserved and requested bytes and retries, after each event.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.errors import OutOfMemory

FILE = Path(__file__).parent / "torch_2.13.0_allocator.jsonl"
RECORDED = [json.loads(line) for line in FILE.read_text().splitlines()]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['settings'] or 'default'}-{case['sha256'][:6]}")
def test_every_state_is_the_one_pytorch_reached(case: dict[str, Any]) -> None:
    config = AllocatorConfig.parse(case["settings"])
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
