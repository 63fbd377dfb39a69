"""One real trial of a job's step, in a process of its own: does it run within the budget, and what did it take?

The process gets a question as JSON on standard input, and gives the answer as the last line of standard output. On a
CPU the step first runs under RLIMIT_DATA, where going over it fails as it would in ``memfit run``; then, where it
passed, once more without a limit and under the profiler, which tells the allocator's peak of each phase (it takes
memory of its own). On a GPU the allocator counts these itself, in the same run.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.errors import Exit, InputError, mistake_in_job, mistake_of_leaving
from memfit.job import Shape


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to run. ``budget_bytes`` is what the process may take beyond what it held before the job was built."""

    job: str
    settings: dict[str, Any]
    items: int
    length: int | None
    micro_batches: int = 1
    checkpointing: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    """cpu or cuda."""
    budget_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial. Bytes are None where it did not run to its end."""

    micro_batch: int
    """In units."""
    ok: bool
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    """Of a CPU: the growth of the process's memory, which its limit counts; of a GPU: of the whole card."""
    seconds: float | None = None
    """Of the second window."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """Allocated bytes at the peak of each phase, of which setup, which builds the nets, is one."""
    error: str = ""
    failed_in: str = ""
    """The phase in which memory ran out: setup, train, validate or save."""


def run_trial(question: Question) -> Trial:
    """Runs a trial in a fresh process.

    Raises:
        InputError: the step fails for another reason than memory.
    """
    from memfit.train.launch.memory_limit import ENVIRONMENT

    done = subprocess.run(
        [sys.executable, "-m", "memfit.train.probe.trial"],
        input=json.dumps(asdict(question)),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    units = Shape(items=question.items, length=question.length).units
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Trial(**json.loads(lines[-1]))
    if done.returncode == Exit.BAD_INPUT and lines:
        raise InputError(**json.loads(lines[-1]))
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode == -9:
        return Trial(micro_batch=units, ok=False, error="the system killed the process, most likely for its memory")
    raise InputError(
        f"the trial of {units} units", f"it failed, and not of memory: {last}", "mend the job until its step runs"
    )


def main() -> int:
    """The process of one trial."""
    question = Question(**json.load(sys.stdin))
    standard_output, sys.stdout = sys.stdout, sys.stderr
    try:
        trial = _gpu(question) if question.device == "cuda" else _cpu(question)
    except BaseException as error:
        mistake = error if isinstance(error, InputError) else mistake_in_job(error)
        if mistake is None and isinstance(error, Exception):
            raise
        mistake = mistake or mistake_of_leaving(error)
        print(json.dumps({"seen": mistake.seen, "why": mistake.why, "write": mistake.write}), file=standard_output)
        return Exit.BAD_INPUT
    print(json.dumps(asdict(trial)), file=standard_output)
    return 0


def _cpu(question: Question) -> Trial:
    from memfit.train.launch import memory_limit

    shape, run = _prepared(question)
    from memfit.device.hardware.benchmarks import AllocatorEvents

    begun: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        begun.append(name)
        yield

    before = memory_limit.limit(question.budget_bytes) if question.budget_bytes is not None else 0
    taken = memory_limit.ProcessMemory()
    try:
        seconds = run(noted)
    except Exception as error:
        if not memory_limit.is_memory_failure(error):
            raise
        memory_limit.lift()
        return Trial(micro_batch=shape.units, ok=False, error=str(error).splitlines()[0][-200:], failed_in=begun[-1])
    grown = taken.peak()
    if before:
        memory_limit.lift()
    gc.collect()
    gc.disable()
    with AllocatorEvents() as events:
        run(events.phase)
    peaks = {name: peak.allocated_bytes for name, peak in events.peaks().items()}
    highest = max(peaks.values())
    return Trial(
        micro_batch=shape.units,
        ok=True,
        allocated_bytes=highest,
        reserved_bytes=highest,
        process_bytes=grown,
        seconds=seconds,
        phases=peaks,
    )


def _gpu(question: Question) -> Trial:
    import torch

    peaks: dict[str, int] = {}
    begun: list[str] = []

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        begun.append(name)
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())

    shape, run = _prepared(question)
    free, total = torch.cuda.mem_get_info()
    context = total - free
    if question.budget_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(min(max(question.budget_bytes - context, 1) / total, 1.0))
    try:
        seconds = run(counted)
    except torch.OutOfMemoryError as error:
        return Trial(micro_batch=shape.units, ok=False, error=str(error).splitlines()[0], failed_in=begun[-1])
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    outside = total - free - torch.cuda.memory_reserved()
    return Trial(
        micro_batch=shape.units,
        ok=True,
        allocated_bytes=max(peaks.values()),
        reserved_bytes=reserved,
        process_bytes=reserved + outside,
        seconds=seconds,
        phases=peaks,
    )


def _prepared(question: Question) -> tuple[Shape, Callable[[Callable[[str], Any]], float]]:
    """(shape, what runs setup, two windows, validation and saving, and gives the second window's seconds)."""
    import torch

    from memfit.loading import load_job

    job = load_job(question.job, dict(question.settings))
    from memfit.apply.checkpointing import recompute
    from memfit.apply.train_state import build
    from memfit.apply.window import run_window
    from memfit.device.virtual import backend
    from memfit.trace.step_phases import fetch_synthetic, synthetic_micro_batch, validate_once
    from memfit.train.launch.warm_up import warm_up

    backend.register_virtual_device()
    shape = Shape(items=question.items, length=question.length)
    device = torch.device(question.device)
    warm_up(job, shape.units)
    torch.manual_seed(0)

    def run(phase: Callable[[str], Any]) -> float:
        with phase("setup"):
            train_state = build(job, device)
        micro = synthetic_micro_batch(job, shape, device)
        seconds = 0.0
        with recompute(train_state.nets, question.checkpointing):
            for is_second in (False, True):
                if is_second:  # the collector of a run comes by some time after its first window
                    gc.collect()
                begin = time.perf_counter()
                with phase("train"):
                    run_window(train_state, [micro] * question.micro_batches)
                seconds = time.perf_counter() - begin
        if job.validates:
            with phase("validate"):
                validate_once(
                    train_state, lambda: fetch_synthetic(job, shape, device, validation=True), lambda part: None
                )
        with phase("save"):
            job.saved(train_state.nets, train_state.optimizers)
        return seconds

    return shape, run


if __name__ == "__main__":
    sys.exit(main())
