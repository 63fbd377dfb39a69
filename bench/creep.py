"""What the caching allocator reserves over batches of different shapes, packed as the sampler of F5-TTS does.

python bench/creep.py f5_tts/base 3200 2 12     clips of 2 to 12 s in batches of 3200 frames: GiB after each batch
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memfit.device.hardware.catalogue import Device, find_device
from memfit.events import ALLOCATE, FREE, Trace
from memfit.job import Job, Shape
from memfit.loading import load_job
from memfit.replay.caching_allocator import CachingAllocator
from memfit.trace.step import Tracing, trace_family

FRAMES_PER_SECOND, MOST_CLIPS, CLIPS = 93.75, 64, 6000


def packed_shapes(frames: int, seconds: tuple[float, float], batches: int, seed: int = 0) -> list[Shape]:
    """Batches of clips of uniformly drawn lengths: sorted, packed up to ``frames`` unpadded frames, shuffled.

    Of the first ``batches``, those of a single clip are left out: their events differ, and each would be traced anew.
    """
    drawn = np.random.default_rng(seed)
    lengths = np.sort((drawn.uniform(*seconds, CLIPS) * FRAMES_PER_SECOND).astype(int)).tolist()
    packs: list[list[int]] = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > frames or len(packs[-1]) == MOST_CLIPS:
            packs.append([])
        packs[-1].append(length)
    order = drawn.permutation(len(packs))[:batches]
    return [Shape(items=len(packs[i]), length=packs[i][-1]) for i in order if len(packs[i]) > 1]


def reserved_after(job: Job, card: str, shapes: Sequence[Shape]) -> list[int]:
    """Process bytes that the card shows after each of these batches, one window each, on a card without a limit."""
    device = find_device(card)
    family = trace_family(job, Tracing(device=device), shapes[0])
    allocator = CachingAllocator(None)
    names: dict[int, int] = {}
    reserved = []
    for number, shape in enumerate(shapes):
        trace = family.bound(shape)
        windows = [(start, end) for name, start, end in trace.phases if name == "train"]
        _replay(trace, [(0, windows[1][1])] if number == 0 else windows[-1:], allocator, names)
        reserved.append(_process(allocator, device))
    return reserved


def _replay(trace: Trace, spans: Sequence[tuple[int, int]], allocator: CachingAllocator, names: dict[int, int]) -> None:
    """Replays some events; ``names`` says which block a storage of the trace has now."""
    kind, storage, nbytes = trace.kind.tolist(), trace.storage.tolist(), trace.nbytes.tolist()
    for start, end in spans:
        for event in range(start, end):
            one = storage[event]
            if kind[event] == ALLOCATE:
                names[one] = _next(names)
                allocator.malloc(names[one], nbytes[one])
            elif kind[event] == FREE and one in names:
                allocator.free(names.pop(one))


def _next(names: dict[int, int]) -> int:
    names[-1] = names.get(-1, 0) + 1
    return names[-1]


def _process(allocator: CachingAllocator, device: Device) -> int:
    return allocator.reserved + (device.context_bytes or 0)


def main(name: str, frames: str, low: str, high: str, batches: str = "20") -> None:
    """Prints process bytes after each batch."""
    shapes = packed_shapes(int(frames), (float(low), float(high)), int(batches))
    for shape, nbytes in zip(shapes, reserved_after(load_job(name), "rtx4090", shapes), strict=True):
        print(f"{shape.items:3d} x {shape.length:4d} frames: {nbytes / 2**30:6.2f} GiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
