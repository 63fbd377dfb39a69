"""The fast replay against itself without its shortcut: what it rules out must really be served.

python -m pytest tests/replay/test_fast_replay.py
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.events import ALLOCATE, FREE
from memfit.replay import fast_replay
from memfit.replay.fast_replay import SHIFT, FreeBlocks, peak_if_served


def pool(sizes, least_rest=1):
    """Free blocks of these units, each in a segment of its own."""
    starts = np.cumsum([0, *[size + 1 for size in sizes]])[:-1].tolist()
    spans = dict(zip(starts, sizes, strict=True))
    ordered = np.sort(np.array(sizes, np.int64))
    return FreeBlocks(
        keys=sorted(size << SHIFT | start for start, size in spans.items()),
        ends={start + size: start for start, size in spans.items()},
        starts={start: start + size for start, size in spans.items()},
        least_rest=least_rest,
        tail=-1,
        sizes=ordered,
        at_least=np.append(np.cumsum(ordered[::-1])[::-1], 0),
    )


@st.composite
def windows(draw):
    """(units of free blocks, units of storages, events): every storage is allocated once and freed once."""
    blocks = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    units = draw(st.lists(st.integers(1, 8), min_size=1, max_size=10))
    alive, waiting, events = [], list(range(len(units))), []
    while waiting or alive:
        if waiting and (not alive or draw(st.booleans())):
            alive.append(waiting.pop(0))
            events.append((ALLOCATE, alive[-1]))
        else:
            events.append((FREE, alive.pop(draw(st.integers(0, len(alive) - 1)))))
    return blocks, units, events


@settings(max_examples=400, deadline=None)
@given(windows(), st.sampled_from([1, 3]))
def test_no_request_is_left_out_that_finds_no_block(window, least_rest):
    blocks, units, events = window
    kind = np.array([kind for kind, _ in events], np.int8)
    storage = np.array([storage for _, storage in events], np.int64)
    sizes, pools = np.array(units, np.int64), {True: pool(blocks, least_rest), False: pool([1])}
    peak = peak_if_served(kind, storage, sizes, pools, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_replay, "_last_in_doubt", lambda pool, events, units: len(events.codes))
        assert peak == peak_if_served(kind, storage, sizes, pools, {})


def test_many_small_free_blocks_do_not_serve_a_large_request():
    """Forty units are free, in blocks of 4 of which each lost one: a request of 4 finds none."""
    kind = np.array([ALLOCATE] * 11 + [FREE] * 11, np.int8)
    storage = np.array([*range(11), *range(11)], np.int64)
    units = np.array([1] * 10 + [4], np.int64)
    alone = np.array([4] * 11, np.int64)
    pools = {True: pool([4] * 10), False: pool([1])}
    assert peak_if_served(kind, storage, alone, pools, {}) is None
    assert peak_if_served(kind, storage, units, pools, {}) is not None


def test_one_live_block_cuts_a_free_block_into_two_gaps():
    """Of 14 units, 4 are alive with 5 free on either side: a request of 7 finds no block."""
    kind = np.array([ALLOCATE, ALLOCATE, FREE, ALLOCATE, FREE, FREE], np.int8)
    storage = np.array([0, 1, 0, 2, 2, 1], np.int64)
    pools = {True: pool([14]), False: pool([1])}
    assert peak_if_served(kind, storage, np.array([5, 4, 7], np.int64), pools, {}) is None
    assert peak_if_served(kind, storage, np.array([5, 4, 5], np.int64), pools, {}) is not None
