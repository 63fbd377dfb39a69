"""The replay by numbers against the allocator's own, event by event.

python -m pytest tests/replay/test_plain_replay.py
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.events import ALLOCATE, EMPTY_CACHE, FAILED, FREE, Trace
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.cpu_allocator import CpuAllocator
from memfit.replay.plain_replay import plain_replay
from memfit.replay.replay import _EventReplay, footprint

KIB, MIB = 1 << 10, 1 << 20
BYTES = st.one_of(
    st.integers(0, 4096), st.integers(MIB - 1024, MIB + 1024), st.integers(MIB, 25 * MIB),
    st.sampled_from([0, 1, 512, MIB, 2 * MIB, 10 * MIB, 10 * MIB - 1, 20 * MIB, 19 * MIB, 64 * MIB]),
)  # fmt: skip


def trace_of(events, nbytes, streams, phases=None):
    """A trace of (kind, storage) without operators."""
    count, none = len(nbytes), np.zeros(0, np.int32)
    phases = phases or (("train", 0, len(events)),)
    return Trace(
        kind=np.array([kind for kind, _ in events], np.int8),
        storage=np.array([storage for _, storage in events], np.int32), operator=np.zeros(len(events), np.int32),
        nbytes=np.array(nbytes, np.int64), category=np.zeros(count, np.uint8), stream=np.array(streams, np.uint8),
        made_by=np.zeros(count, np.int32), operator_name=none, operator_module=none, operator_part=none,
        operator_flops=none, operator_bytes=none, names=(), modules=(), parts=(), phases=phases,
    )  # fmt: skip


@st.composite
def traces(draw):
    """Storages in three streams that are allocated once and freed at most once, with the cache emptied between."""
    nbytes = draw(st.lists(BYTES, min_size=1, max_size=40))
    streams = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=len(nbytes), max_size=len(nbytes)))
    alive, events = [], []
    for storage in range(len(nbytes)):
        events.append((ALLOCATE, storage))
        alive.append(storage)
        while alive and draw(st.booleans()):
            events.append((FREE, alive.pop(draw(st.integers(0, len(alive) - 1)))))
        if draw(st.integers(0, 7)) == 0:
            events.append((EMPTY_CACHE, -1))
    events += [(FREE, storage) for storage in alive[draw(st.integers(0, len(alive))) :]]
    return trace_of(events, nbytes, streams)


CONFIGS = st.sampled_from(
    [
        AllocatorConfig(),
        AllocatorConfig(youngest_first=True),
        AllocatorConfig(large_segment_size=32 * MIB),
        AllocatorConfig(roundup_power2_divisions=(4,) * 16),
    ]
)


@settings(max_examples=400, deadline=None)
@given(traces(), CONFIGS, st.one_of(st.none(), st.integers(2 * MIB, 120 * MIB)), st.integers(0, 3), st.data())
def test_the_bytes_are_those_of_the_allocator(trace, config, capacity, missing, data):
    own = _EventReplay(trace, CachingAllocator(capacity, config))
    plain = plain_replay(trace, CachingAllocator(capacity, config))
    middle = data.draw(st.integers(0, len(trace.kind)))
    may_miss = [None, frozenset(), frozenset(range(0, len(trace.nbytes), 2)), frozenset(range(40))][missing]
    for start, end in ((0, middle), (middle, len(trace.kind))):
        (live, failed), (expected, failed_too) = (each.run(start, end, may_miss) for each in (plain, own))
        assert failed == failed_too
        assert live.tolist() == expected.tolist()
        assert plain.peak_reserved == own.peak_reserved
        assert plain.missing == own.missing
        if failed is not None:
            break
        assert plain.allocated == own.allocated


@settings(max_examples=100, deadline=None)
@given(traces(), st.integers(2 * MIB, 120 * MIB), st.data())
def test_footprints_are_those_of_the_allocator(trace, capacity, data):
    first, second = sorted(data.draw(st.integers(0, len(trace.kind))) for _ in range(2))
    phases = (("setup", 0, first), (FAILED, first, second), ("train", second, len(trace.kind)))
    trace = replace(trace, phases=phases, operator_name=np.zeros(1, np.int32), names=("aten.add.Tensor",))
    trace = replace(trace, operator_module=np.zeros(1, np.int32), modules=("",))
    plain, own = (
        footprint(trace, allocator, capacity, capacity)
        for allocator in (CachingAllocator, lambda limit: CachingAllocator(limit, history=[]))
    )
    assert plain == own


@pytest.mark.parametrize(
    "config",
    [
        AllocatorConfig(expandable_segments=True),
        AllocatorConfig(max_split_size=64 * MIB),
    ],
)
def test_other_settings_are_replayed_by_the_allocator_itself(config):
    trace = trace_of([(ALLOCATE, 0)], [KIB], [0])
    assert plain_replay(trace, CachingAllocator(None, config)) is None
    assert plain_replay(trace, CpuAllocator()) is None
    assert plain_replay(trace, partial(CachingAllocator, history=[])()) is None
    assert plain_replay(trace, CachingAllocator()) is not None


def test_addresses_of_released_segments_do_not_run_out():
    """A cache of 64 GiB that is emptied a thousand times, as by searches of convolution plans."""
    events = [event for number in range(1000) for event in ((ALLOCATE, number), (FREE, number), (EMPTY_CACHE, -1))]
    trace = trace_of(events, [64 << 30] * 1000, [0] * 1000)
    for first in (False, True):
        replay = plain_replay(trace, CachingAllocator(None, AllocatorConfig(youngest_first=first)))
        live, _ = replay.run(0, len(events), None)
        assert (live[0], live[-1], replay.peak_reserved) == (64 << 30, 0, 64 << 30)
