"""Speed of the replayed allocator, and what its settings would reserve for the same events.

python -m bench.allocator [--events 22500]

The events are made up in the shape of training steps: per layer activations kept until its backward, temporaries freed
at once, at three alternating lengths, so that the cache fragments.
"""

from __future__ import annotations

import argparse
import random
import time

from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.cpu_allocator import CpuAllocator
from memfit.sizes import format_size

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:64",
)


def made_up_events(count: int) -> list[tuple[int, int]]:
    """(storage, bytes) allocates, (storage, -1) frees."""
    dice, events, storage = random.Random(0), list[tuple[int, int]](), 0
    while len(events) < count:
        length, kept = dice.choice([700, 1000, 1300]), list[int]()
        for _layer in range(200):
            for nbytes in (4096 * length, 3000, 1024 * length):
                events.append((storage, nbytes + dice.randrange(512)))
                kept.append(storage)
                storage += 1
            events += [(storage, 8192 * length), (storage, -1)]
            storage += 1
        for held in reversed(kept):
            events += [(storage, 4096 * length), (storage, -1), (held, -1)]
            storage += 1
    return events


def replay(allocator: CachingAllocator | CpuAllocator, events: list[tuple[int, int]]) -> float:
    """Seconds of one replay."""
    malloc, free = allocator.malloc, allocator.free
    start = time.perf_counter()
    for storage, nbytes in events:
        if nbytes >= 0:
            malloc(storage, nbytes)
        else:
            free(storage)
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--events", type=int, default=22_500)
    given = options.parse_args()
    events = made_up_events(given.events)
    print(f"{len(events)} events, best of five")
    print(f"{'settings':<28}{'seconds':>9}{'events/s':>12}{'allocated':>12}{'reserved':>12}")
    exact = min(replay(CpuAllocator(), events) for _ in range(5))
    print(f"{'(no cache, as on CPU)':<28}{exact:>9.4f}{len(events) / exact:>12,.0f}")
    for settings in SETTINGS:
        runs = [CachingAllocator(None, AllocatorConfig.parse(settings)) for _ in range(5)]
        seconds = min([replay(allocator, events) for allocator in runs])
        peaks = format_size(runs[0].peak_allocated), format_size(runs[0].peak_reserved)
        print(
            f"{settings or '(default)':<28}{seconds:>9.4f}{len(events) / seconds:>12,.0f}{peaks[0]:>12}{peaks[1]:>12}"
        )


if __name__ == "__main__":
    main()
