"""A sequence replayed fast is the sequence replayed event by event.

python -m pytest tests/replay/test_window_sequence.py
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.device.hardware.catalogue import find_device
from memfit.events import ALLOCATE, FREE, Trace
from memfit.job import Shape
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.fast_replay import free_blocks
from memfit.replay.window_events import window_layout
from memfit.replay.window_sequence import replay_sequence
from memfit.trace.step import Tracing, trace_family
from testing.nets import Transformer

MIB = 1 << 20
CONFIGS = (
    AllocatorConfig(),
    AllocatorConfig(expandable_segments=True),
    AllocatorConfig.parse("roundup_power2_divisions:4"),
)


def trace_of(events: list[tuple[int, int]], nbytes: list[int], setup: int) -> Trace:
    """A trace of events (kind, storage): a setup, and a window that comes twice, of which the first half is forward."""
    kind, storage = (np.array([event[i] for event in events]) for i in (0, 1))
    count = len(events) - setup
    empty = np.zeros(len(nbytes), np.uint8)
    twice = np.concatenate([storage, np.where(storage[setup:] < setup, storage[setup:], storage[setup:])])
    return Trace(
        kind=np.concatenate([kind, kind[setup:]]).astype(np.int8),
        storage=twice.astype(np.int32),
        operator=np.zeros(len(events) + count, np.int32),
        nbytes=np.array(nbytes, np.int64),
        category=empty, stream=empty, made_by=np.zeros(len(nbytes), np.int32),
        operator_name=np.zeros(1, np.int32), operator_module=np.zeros(1, np.int32), operator_part=np.zeros(1, np.int32),
        operator_flops=np.zeros(1, np.int64), operator_bytes=np.zeros(1, np.int64),
        names=("x",), modules=("",), parts=("forward",),
        phases=(("setup", 0, setup), ("train", setup, setup + count), ("train", setup + count, setup + 2 * count)),
    )  # fmt: skip


class SimulatedFamily:
    """One structure, whose storages have other bytes at every shape."""

    def __init__(self, trace: Trace, bytes_at: list[list[int]]) -> None:
        self.trace, self.bytes_at = trace, bytes_at

    def at(self, shape: Shape) -> Trace:
        return dataclasses.replace(self.trace, nbytes=np.array(self.bytes_at[shape.items], np.int64))


@st.composite
def families(draw):
    """Some persistent storages, and a window that frees all it allocates, in any order."""
    persistent, temporary = draw(st.integers(0, 4)), draw(st.integers(1, 24))
    events = [(ALLOCATE, number) for number in range(persistent)]
    live: list[int] = []
    waiting = list(range(persistent, persistent + temporary))
    while waiting or live:
        if waiting and (not live or draw(st.booleans())):
            live.append(waiting.pop(0))
            events.append((ALLOCATE, live[-1]))
        else:
            events.append((FREE, live.pop(draw(st.integers(0, len(live) - 1)))))
    size = st.one_of(st.integers(0, 3 * MIB), st.integers(MIB - 600, MIB + 600), st.integers(0, 40 * MIB))
    count = draw(st.integers(1, 5))
    kept = draw(st.lists(size, min_size=persistent, max_size=persistent))
    bytes_at = [kept + draw(st.lists(size, min_size=temporary, max_size=temporary)) for _ in range(count)]
    order = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    return SimulatedFamily(trace_of(events, bytes_at[0], persistent), bytes_at), [(Shape(items=i),) for i in order]


@settings(max_examples=150, deadline=None)
@given(families(), st.sampled_from(CONFIGS), st.one_of(st.none(), st.integers(20 * MIB, 400 * MIB)))
def test_fast_is_every_event(case, config, capacity):
    family, windows = case
    fast = replay_sequence(family, windows, config=config, capacity=capacity)
    assert fast == replay_sequence(family, windows, config=config, capacity=capacity, fast=False)
    if fast.failed_window is None:
        assert fast.reserved_bytes >= fast.allocated_bytes
        assert [after for _, after in fast.growth] == sorted(after for _, after in fast.growth) or capacity is not None
    elif fast.failed_window == 0:
        assert fast.growth == ()


def test_free_blocks_of_neighbouring_segments_do_not_touch():
    allocator = CachingAllocator(None)
    for storage in range(3):
        allocator.malloc(storage, 20 * MIB)
    for storage in range(3):
        allocator.free(storage)
    blocks = free_blocks(allocator)[False]
    assert len(blocks.keys) == 3
    assert not blocks.ends.keys() & blocks.starts.keys()


DEVICE = find_device("rtx4090")


@pytest.mark.parametrize("zero_grad", ["after_step", "after_forward"])
def test_a_real_family_with_windows_of_several_micro_batches(zero_grad):
    class Own(Transformer):
        depth: int = 1

    Own.zero_grad = zero_grad
    family = trace_family(Own(), Tracing(device=DEVICE, micro_batches=2, scratch=False), Shape(items=2, length=64))
    rng = np.random.default_rng(0)
    windows = [
        tuple(
            Shape(items=int(rng.integers(2, 9)), length=8 * int(rng.integers(1, 50))) for _ in range(rng.integers(1, 4))
        )
        for _ in range(24)
    ]
    for config in CONFIGS[:2]:
        assert replay_sequence(family, windows, config=config) == replay_sequence(
            family, windows, config=config, fast=False
        )
    layout = window_layout([family.at(shape) for shape in windows[0]])
    assert len(layout.carried_in) == len(layout.carried_out)
    assert bool(len(layout.carried_in)) is (zero_grad == "after_forward")


def test_varied_lengths_reserve_more_than_they_allocate_and_expandable_segments_less():
    family = trace_family(Transformer(depth=1), Tracing(device=DEVICE, scratch=False), Shape(items=2, length=64))
    rng = np.random.default_rng(0)
    lengths = (8 * rng.integers(8, 256, 60)).tolist()
    windows = [(Shape(items=max(65536 // length, 2), length=length),) for length in lengths]
    plain = replay_sequence(family, windows)
    expandable = replay_sequence(family, windows, config=CONFIGS[1])
    assert plain.windows == 60
    assert plain.ratio > expandable.ratio >= 1
    assert plain.growth[-1][1] == plain.reserved_bytes > plain.growth[0][1]
    assert replay_sequence(family, windows, capacity=plain.reserved_bytes).failed_window is None
    under = replay_sequence(family, windows, capacity=plain.allocated_bytes - (1 << 20))
    assert under.failed_window is not None
    assert under.windows == under.failed_window
