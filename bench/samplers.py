"""Samplers of speech lengths, compared in one run: python -m bench.samplers [--samples N] [--without NAME] [--json F].

8 ranks, lognormal lengths of 0.3 to 30 s at 93.75 frames a second, at most 38,400 frames a batch. Each sampler plans an
epoch in a fresh process. Columns: CPU seconds to plan; peak memory of the process; padding as a part of the padded
frames; the largest batch in padded frames over the threshold; imbalance, the mean over steps of the slowest rank over
the mean rank, less one, in padded frames and in frames times length; seconds to resume half-way through the epoch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from bench.result_file import ROOT, add_json_option, target, write_result

WORLD, THRESHOLD, RATE = 8, 38_400, 93.75
Batches = list[list[np.ndarray]]
"""By step, by rank: the lengths in frames of a batch's samples."""


def lengths_of(samples: int) -> np.ndarray:
    seconds = np.random.default_rng(0).lognormal(1.6, 0.7, samples)
    return (np.clip(seconds, 0.3, 30) * RATE).astype(np.int64)


def ours(noise: float) -> Callable[[np.ndarray], tuple[float, float, Batches]]:
    def run(lengths: np.ndarray) -> tuple[float, float, Batches]:
        from memfit.batch import LengthBatchSampler

        begin = time.process_time()
        sampler = LengthBatchSampler(lengths, THRESHOLD, rank=0, world=WORLD, noise=noise)
        plan = sampler.plan()
        planned = time.process_time() - begin
        state = sampler.state_at(plan.steps // 2)
        begin = time.process_time()
        again = LengthBatchSampler(lengths, THRESHOLD, rank=0, world=WORLD, noise=noise)
        again.load_state_dict(state)
        next(iter(again))
        resumed = time.process_time() - begin
        return planned, resumed, [[lengths[plan.ids(s, r)] for r in range(WORLD)] for s in range(plan.steps)]

    return run


def sort_and_pack(lengths: np.ndarray) -> tuple[float, float, Batches]:
    """F5-TTS's kind: sorted, the sum of unpadded frames up to the threshold, at most 64 clips, batches shuffled."""

    def plan() -> list[list[int]]:
        batches, batch, filled = [], [], 0
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and (filled + lengths[index] > THRESHOLD or len(batch) == 64):
                batches.append(batch)
                batch, filled = [], 0
            batch.append(index)
            filled += lengths[index]
        batches.append(batch)
        random.Random(0).shuffle(batches)
        return batches

    return _by_turns(plan, lengths)


def vits_buckets(lengths: np.ndarray) -> tuple[float, float, Batches]:
    """VITS's kind: ten buckets of equal width, a fixed number of clips a batch, each bucket padded to whole steps."""
    bounds = np.linspace(lengths.min() - 1, lengths.max(), 11)
    size = int(THRESHOLD // lengths.max())

    def plan() -> list[list[int]]:
        steps = []
        for low, high in itertools.pairwise(bounds):
            ids = [index for index, length in enumerate(lengths) if low < length <= high]
            random.Random(0).shuffle(ids)
            padded_count = -(-len(ids) // (WORLD * size)) * WORLD * size
            ids = (ids * (padded_count // max(1, len(ids)) + 1))[:padded_count]
            steps += [ids[at : at + WORLD * size] for at in range(0, padded_count, WORLD * size)]
        random.Random(0).shuffle(steps)
        return [step[at : at + size] for step in steps for at in range(0, WORLD * size, size)]

    return _by_turns(plan, lengths)


def lhotse_buckets(lengths: np.ndarray) -> tuple[float, float, Batches]:
    from lhotse import CutSet, MonoCut, Recording
    from lhotse.dataset import DynamicBucketingSampler

    recording = Recording(id="r", sources=[], sampling_rate=24_000, num_samples=24_000 * 30, duration=30.0)
    cuts = [
        MonoCut(id=str(index), start=0, duration=float(length) / RATE, channel=0, recording=recording)
        for index, length in enumerate(lengths)
    ]

    def sampler(rank: int, world: int) -> DynamicBucketingSampler:
        options = {"num_buckets": 30, "shuffle": True, "world_size": world, "rank": rank}
        return DynamicBucketingSampler(CutSet.from_cuts(cuts), max_duration=THRESHOLD / RATE, **options)

    begin = time.process_time()
    steps = sum(1 for _ in sampler(0, WORLD))
    planned = time.process_time() - begin
    half = sampler(0, WORLD)
    iterator = iter(half)
    for _ in range(steps // 2):
        next(iterator)
    state = half.state_dict()
    begin = time.process_time()
    again = sampler(0, WORLD)
    again.load_state_dict(state)
    next(iter(again))
    resumed = time.process_time() - begin
    flat = [np.array([round(cut.duration * RATE) for cut in batch]) for batch in sampler(0, 1)]
    return planned, resumed, [flat[at : at + WORLD] for at in range(0, len(flat) - WORLD + 1, WORLD)]


def _by_turns(plan: Callable[[], list[list[int]]], lengths: np.ndarray) -> tuple[float, float, Batches]:
    """Batches dealt to ranks in turn; to resume is to plan again and skip."""
    begin = time.process_time()
    batches = plan()
    planned = time.process_time() - begin
    begin = time.process_time()
    next(iter(plan()[len(batches) // 2 :]))
    resumed = time.process_time() - begin
    flat = [lengths[batch] for batch in batches]
    return planned, resumed, [flat[at : at + WORLD] for at in range(0, len(flat) - WORLD + 1, WORLD)]


SAMPLERS: dict[str, Callable[[np.ndarray], tuple[float, float, Batches]]] = {
    "memfit": ours(0.0),
    "memfit, noise 1 %": ours(0.01),
    "memfit, noise 3 %": ours(0.03),
    "sort and pack": sort_and_pack,
    "VITS buckets": vits_buckets,
    "Lhotse, 30 buckets": lhotse_buckets,
}


def measure(name: str, samples: int) -> dict[str, float]:
    """Figures of one sampler, in this process."""
    planned, resumed, steps = SAMPLERS[name](lengths_of(samples))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    padded = np.array([[len(batch) * batch.max() for batch in step] for step in steps], dtype=np.float64)
    squares = np.array([[len(batch) * float(batch.max()) ** 2 for batch in step] for step in steps])
    filled = sum(int(batch.sum()) for step in steps for batch in step)
    return {
        "seconds": planned,
        "peak_mib": peak,
        "padding": 1 - filled / padded.sum(),
        "largest": padded.max() / THRESHOLD,
        "imbalance": float((padded.max(axis=1) / padded.mean(axis=1) - 1).mean()),
        "imbalance_quadratic": float((squares.max(axis=1) / squares.mean(axis=1) - 1).mean()),
        "resume": resumed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000, help="number of lengths (default: 1000000)")
    parser.add_argument("--only", choices=list(SAMPLERS), help="one sampler, as JSON")
    parser.add_argument("--without", action="append", default=[], choices=list(SAMPLERS), help="leaves a sampler out")
    add_json_option(parser)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given.samples)))
        return
    print(f"{given.samples:,} samples, {WORLD} ranks, threshold {THRESHOLD:,} frames")
    print(f"{'':20}{'CPU s':>9}{'MiB':>8}{'padding':>9}{'largest':>9}{'imbal.':>9}{'quadr.':>9}{'resume s':>10}")
    rows = {}
    for name in [name for name in SAMPLERS if name not in given.without]:
        run = [sys.executable, "-m", "bench.samplers", "--samples", str(given.samples), "--only", name]
        row = json.loads(subprocess.run(run, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
        rows[name] = row
        print(
            f"{name:20}{row['seconds']:9.2f}{row['peak_mib']:8.0f}{row['padding']:9.2%}{row['largest']:9.3f}"
            f"{row['imbalance']:9.2%}{row['imbalance_quadratic']:9.2%}{row['resume']:10.2f}",
            flush=True,
        )
    figures = {"samples": given.samples, "ranks": WORLD, "threshold_frames": THRESHOLD, "samplers": rows}
    write_result(target(given.json), figures, packages=["lhotse"])


if __name__ == "__main__":
    main()
