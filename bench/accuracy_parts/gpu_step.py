"""One configuration really run in this process: memory and time of its windows, validation and saving.

python -m bench.accuracy_parts.gpu_step '{"job": …}'    (bench/measure_gpu.py starts it); prints a line of JSON
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from bench.accuracy_parts.measured import Measured
from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.geometry import shape_of
from memfit.job import Job, Shape
from memfit.loading import load_job
from memfit.planner.predict import checkpoint_all, plain_nets, with_precision
from memfit.trace.step_phases import fetch_synthetic, synthetic_micro_batch, validate_once

WINDOWS = 5


def measure(wanted: Measured, windows: int = WINDOWS) -> Measured:
    """The same configuration with what was measured; on a card where it names one, on the CPU otherwise."""
    job = with_precision(load_job(wanted.job, wanted.settings), wanted.precision)
    shape = shape_of(job, wanted.micro_batch)
    modes = checkpoint_all(job, plain_nets(job)) if wanted.checkpoint == "all" else {}
    if wanted.card == "cpu":
        with AllocatorEvents() as events, events.phase("all"):
            seconds = run(job, shape, torch.device("cpu"), modes, windows)
        return replace(
            wanted, ok=True, allocated_bytes=events.peaks()["all"].allocated_bytes, step_seconds=seconds,
            torch=torch.__version__,
        )  # fmt: skip
    return _on_card(wanted, job, shape, modes, windows)


def run(job: Job, shape: Shape, device: torch.device, modes: dict[str, str], windows: int) -> float | None:
    """Trains, validates and saves; median seconds of the windows after the second."""
    torch.manual_seed(0)
    train_state = build(job, device)
    micro = synthetic_micro_batch(job, shape, device)
    times = []
    with recompute(train_state.nets, modes):
        for _ in range(windows):
            begin = time.perf_counter()
            run_window(train_state, [micro])
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    if job.validates:
        validate_once(train_state, lambda: fetch_synthetic(job, shape, device, validation=True), lambda part: None)
    job.saved(train_state.nets, train_state.optimizers)
    return statistics.median(times[2:]) if len(times) > 2 else None


def _on_card(wanted: Measured, job: Job, shape: Shape, modes: dict[str, str], windows: int) -> Measured:
    """Bytes of torch's own counters; of the process, what the card has less than before, as it is alone on it."""
    before = int(os.environ.get("MEMFIT_USED_BEFORE", "0"))
    total = torch.cuda.get_device_properties(0).total_memory
    if wanted.memory_gib is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, wanted.memory_gib * 2**30 / total))
    seconds, ok = None, True
    try:
        seconds = run(job, shape, torch.device("cuda"), modes, windows)
    except torch.OutOfMemoryError:
        ok = False
    gc.collect()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - before - torch.cuda.memory_reserved()
    reserved = torch.cuda.max_memory_reserved()
    return replace(
        wanted, ok=ok, torch=torch.__version__, step_seconds=seconds, reserved_bytes=reserved,
        allocated_bytes=torch.cuda.max_memory_allocated(), process_bytes=reserved + outside,
    )  # fmt: skip


def main(text: str) -> None:
    """Reads a configuration and prints what was measured."""
    torch.set_num_threads(1)
    wanted: dict[str, Any] = json.loads(text)
    print(json.dumps(asdict(measure(Measured(**wanted)))))


if __name__ == "__main__":
    main(sys.argv[1])
