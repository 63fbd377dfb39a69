"""What the caching allocator reserves over batches of different shapes, packed as the sampler of F5-TTS does.

python -m bench.creep [--job f5_tts/base] [--device rtx4090] [--batches 20] [--json F]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.result_file import add_json_option, target, write_result
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
            block = storage[event]
            if kind[event] == ALLOCATE:
                names[block] = _next(names)
                allocator.malloc(names[block], nbytes[block])
            elif kind[event] == FREE and block in names:
                allocator.free(names.pop(block))


def _next(names: dict[int, int]) -> int:
    names[-1] = names.get(-1, 0) + 1
    return names[-1]


def _process(allocator: CachingAllocator, device: Device) -> int:
    return allocator.reserved + (device.context_bytes or 0)


CASES = ((3200, (2.0, 12.0)), (7000, (2.0, 12.0)), (3200, (1.0, 20.0)), (7000, (1.0, 20.0)))
"""Frames of a batch, and the shortest and longest clip in seconds."""


def main() -> None:
    """Prints process bytes after each batch, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="f5_tts/base")
    parser.add_argument("--device", default="rtx4090")
    parser.add_argument("--batches", type=int, default=20)
    add_json_option(parser)
    asked = parser.parse_args()
    cases = []
    for frames, seconds in CASES:
        shapes = packed_shapes(frames, seconds, asked.batches)
        after = reserved_after(load_job(asked.job), asked.device, shapes)
        cases.append({
            "frames": frames, "clip_seconds": seconds, "shapes": [str(shape) for shape in shapes],
            "process_bytes_after_batch": after,
        })  # fmt: skip
        print(f"{frames} frames, clips of {seconds[0]:.0f} to {seconds[1]:.0f} s")
        for shape, nbytes in zip(shapes, after, strict=True):
            print(f"  {shape.items:3d} x {shape.length:4d} frames: {nbytes / 2**30:6.2f} GiB", flush=True)
    write_result(target(asked.json), {"job": asked.job, "device": asked.device, "cases": cases})


if __name__ == "__main__":
    main()
