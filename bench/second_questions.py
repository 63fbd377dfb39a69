"""Seconds of first and second questions to the same job, by the clock and of the processor.

python -m bench.second_questions [--rounds 3] [--only TEXT] [--json F]

Each job is asked once with an empty cache and captured output. Once the process that traces for later questions has
ended, every second question is asked once, and rounds follow, each with every second question in a random order. Then
each second question is asked right after the first, with an empty cache, while that process has just begun.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.result_file import ROOT, add_json_option, target, write_result
from memfit.cli.background_traces import LOCK

JOBS = {
    "f5_tts/base": "--shape 3x2812",
    "examples/llama_lora.py:Llama8B": "--micro-batch 6144",
    "examples/unet.py:Discs": "--micro-batch 24",
    "examples/gan.py:Waves": "--micro-batch 24",
    "latentsync/stage1": "--micro-batch 8",
    "latentsync/stage2": "--micro-batch 8",
}
"""Jobs, and another micro-batch of each. LatentSync's second stage makes twice as many operators as its first."""
FIRST = "predict {job} --device rtx4090"
SECOND = {
    "the same": "predict {job} --device rtx4090",
    "budget": "predict {job} --device rtx4090 --budget 20GiB --headroom 5%",
    "card, same kernels": "predict {job} --device l40s",
    "card, other kernels": "predict {job} --device h100",
    "every card": "predict {job} --device all",
    "micro-batch": "predict {job} --device rtx4090 {other}",
    "every card, micro-batch": "predict {job} --device all {other}",
    "other kernels, micro-batch": "predict {job} --device t4 {other}",
    "max": "max {job} --device rtx4090",
    "max, another card": "max {job} --device l4",
    "max, other kernels": "max {job} --device h100",
    "cards": "cards {job} --no-largest",
    "compare": "compare {job} --checkpoint all --device rtx4090",
}
"""Second questions; each is asked once before the rounds."""


def asked(command: str, job: str, cache: str) -> dict[str, float]:
    """Seconds by the clock and of the processor of one command."""
    arguments = command.format(job=job, other=JOBS[job]).split()
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "MEMFIT_KEEP_TRACES": "1", "PYTHONWARNINGS": "ignore"}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "memfit", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    clock, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(arguments)}: exit code {done.returncode}: {done.stderr[-500:]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"clock": clock, "processor": used}


def traced_ahead(cache: str) -> float:
    """Seconds by the clock until the process that traces for later questions has ended."""
    begin, lock = time.perf_counter(), Path(cache) / "memfit" / "traces" / LOCK
    while not (lock.exists() and lock.read_text()):  # it names the job once it has the lock
        time.sleep(0.05)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    return time.perf_counter() - begin


def asked_at_once(command: str, job: str) -> dict[str, float]:
    """Seconds of a second question that is asked right after the first."""
    with tempfile.TemporaryDirectory() as folder:
        cache = f"{folder}/cache"
        asked(FIRST, job, cache)
        seconds = asked(command, job, cache)
        end_background(cache)
    return seconds


def end_background(cache: str) -> None:
    """Ends the processes that trace for later questions."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("XDG_CACHE_HOME") == cache:
                process.kill()
                processes.append(process)
    psutil.wait_procs(processes, timeout=10)


def spread(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Least, median and most of each kind of seconds."""
    rows: dict[str, Any] = {"count": len(samples)}
    for kind in ("clock", "processor"):
        values = [sample[kind] for sample in samples]
        rows[kind] = {"least": min(values), "median": statistics.median(values), "most": max(values)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="text that a job's name contains")
    add_json_option(parser)
    options = parser.parse_args()
    chance, jobs = random.Random(0), {}
    for job in [name for name in JOBS if options.only in name]:
        with tempfile.TemporaryDirectory() as folder:
            cache = f"{folder}/cache"
            first = {**asked(FIRST, job, cache), "traced_ahead": traced_ahead(cache)}
            before = {name: asked(command, job, cache) for name, command in SECOND.items()}
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in SECOND}
            traced_ahead(cache)
            for _ in range(options.rounds):
                for name in chance.sample(list(SECOND), len(SECOND)):
                    samples[name].append(asked(SECOND[name], job, cache))
        at_once = {name: asked_at_once(command, job) for name, command in SECOND.items()}
        rows = {name: spread(values) for name, values in samples.items()}
        jobs[job] = {"first": first, "once_before": before, "at_once": at_once, "second": rows}
        for name, row in rows.items():
            clock, used = row["clock"], row["processor"]
            print(
                f"{job:32} {name:20} {clock['median']:6.2f} s ({clock['least']:.2f} to {clock['most']:.2f}), "
                f"processor {used['median']:.2f} s; once before {before[name]['clock']:.1f} s, "
                f"right after the first {at_once[name]['clock']:.1f} s",
                flush=True,
            )
    figures = {"rounds": options.rounds, "commands": {"first": FIRST, **SECOND}, "jobs": jobs}
    write_result(target(options.json, complete=not options.only), figures)


if __name__ == "__main__":
    main()
