"""A long epoch of F5-TTS through the allocator: time of 10,000 windows of different shapes, and what the published
figures of varied lengths come to.

python -m bench.sequence [--windows 10000] [--json F]

Assumed, since the lengths of the users' data are not published: clips of 0.3 to 30 s, lognormal, median 5 s, and
a sigma of 0.6, as a small speech corpus has. Batches as F5-TTS packs them: sorted by length, the sum of unpadded frames
up to the threshold, at most 64 clips, in an order drawn by seed.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.result_file import add_json_option, target, write_result
from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.loading import load_job
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.window_sequence import Window, replay_sequence
from memfit.trace.step import Tracing, trace_family
from memfit.trace.trace_family import TraceFamily

FRAMES = 93.75
PUBLISHED = {3200: 12.4e9, 7000: 19552 * 2**20}
"""Bytes of the process that users published for Base in fp32 on one GPU, by frames in a batch."""


def clip_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Frames of clips of 0.3 to 30 s."""
    seconds = np.random.default_rng(seed).lognormal(np.log(5.0), 0.6, count)
    return np.maximum((np.clip(seconds, 0.3, 30.0) * FRAMES).astype(int), 2)


def packed(lengths: np.ndarray, threshold: int, seed: int = 0) -> list[Window]:
    """Windows of one micro-batch, as F5-TTS's dynamic sampler makes them."""
    batches: list[list[int]] = [[]]
    for length in np.sort(lengths).tolist():
        if length > threshold:
            continue
        if batches[-1] and (sum(batches[-1]) + length > threshold or len(batches[-1]) == 64):
            batches.append([])
        batches[-1].append(length)
    order = np.random.default_rng(seed).permutation(len(batches))
    return [(Shape(items=len(batches[i]), length=max(batches[i])),) for i in order]


def different(count: int, threshold: int, longest: int) -> list[Window]:
    """Windows of which no two have the same shape."""
    rng, shapes = np.random.default_rng(0), {}
    while len(shapes) < count:
        length = int(rng.integers(30, longest))
        shapes[(Shape(items=int(rng.integers(1, max(threshold // length, 1) + 1)), length=length),)] = None
    return list(shapes)


def main() -> None:
    """Prints each result, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=10_000)
    add_json_option(parser)
    options = parser.parse_args()
    device = find_device("rtx4090")
    job = load_job("f5_tts/base", {"precision": "fp32"})
    begin = time.process_time()
    family = trace_family(job, Tracing(device=device, scratch=False), Shape(items=2, length=64))
    shapes = different(options.windows, 7000, 2812)
    for (shape,) in shapes[:200]:
        family.at(shape)
    results: dict[str, object] = {"processor_seconds_of_tracing": round(time.process_time() - begin, 1)}
    begin = time.process_time()
    replayed = replay_sequence(family, shapes)
    results["different shapes"] = {
        "windows": replayed.windows, "distinct_shapes": replayed.distinct_shapes,
        "processor_seconds": round(time.process_time() - begin, 1), "ratio": round(replayed.ratio, 3),
    }  # fmt: skip
    print(results)
    for threshold, published in PUBLISHED.items():
        results[f"{threshold} frames"] = epoch(family, threshold, published, device.context_bytes or 0)
        print(threshold, results[f"{threshold} frames"])
    write_result(target(options.json), results)


def epoch(family: TraceFamily, threshold: int, published: float, context: int) -> dict[str, object]:
    """Process bytes over an epoch beside those published, with and without expandable segments."""
    windows = packed(clip_lengths(20_000), threshold)
    by_name = {}
    for name, expandable in (("segments", False), ("expandable", True)):
        peaks = replay_sequence(family, windows, config=AllocatorConfig(expandable_segments=expandable))
        process = peaks.reserved_bytes + context
        after = {number: next(r for w, r in reversed(peaks.growth) if w <= number) + context for number in (0, 10, 100)}
        by_name[name] = {
            "allocated_bytes": peaks.allocated_bytes, "reserved_bytes": peaks.reserved_bytes,
            "ratio": round(peaks.ratio, 3), "process_bytes": process, "over_published": round(process / published, 3),
            "process_bytes_after_windows": after, "last_growth_in_window": peaks.growth[-1][0],
        }  # fmt: skip
    return {"windows": len(windows), "published_bytes": int(published), **by_name}


if __name__ == "__main__":
    main()
