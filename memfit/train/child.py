"""The process that trains: started by ``memfit run`` with a fixed mmap threshold, limited to the plan's budget."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch import nn

from memfit.apply.rig import build
from memfit.batch.windows import Windows
from memfit.device import backend
from memfit.errors import Exit, InputError, mistake_in_job
from memfit.loading import load_job
from memfit.plan import Plan, read_plan
from memfit.planner.predict import plain_nets
from memfit.sizes import format_size
from memfit.train import limit
from memfit.train.checkpoints import Checkpoints
from memfit.train.folder import CannotWriteError, RunFolder
from memfit.train.loop import Course, train
from memfit.train.progress import Progress
from memfit.train.resume import resume
from memfit.train.saver import Saver


def main(arguments: list[str]) -> int:
    """Trains ``RUN/plan.toml``: RUN, windows (0: the job's own), resume or start, checkpoints kept, seconds between."""
    path, windows, start, keep, every = [*arguments, *("2", "60")[len(arguments) - 3 :]]
    folder = RunFolder(path)
    try:
        return run(folder, int(windows), start == "resume", int(keep), float(every))
    except InputError as error:
        print(f"memfit: {error}", file=sys.stderr)
        return Exit.BAD_INPUT
    except CannotWriteError as error:
        say(str(error))
        return Exit.STOPPED
    except Exception as error:
        mistake = mistake_in_job(error)
        if mistake is None:
            raise
        print(f"memfit: {mistake}", file=sys.stderr)
        return Exit.BAD_INPUT


def run(folder: RunFolder, windows: int, resumed: bool, keep: int, every: float) -> Exit:
    """Trains a run's plan within its budget."""
    backend.register()
    plan = read_plan(folder.plan)
    job = load_job(plan.job, dict(plan.settings))
    device = device_of(plan)
    samples, lengths = job.dataset(), job.lengths()
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        write = "write dataset(self) -> a sequence of samples, with a length"
        raise InputError(f"{type(job).__name__}.dataset()", f"gave {type(samples).__name__}, not a sequence", write)
    course_windows = Windows(
        size=len(samples), lengths=lengths, global_batch=plan.global_batch, micro_batch=plan.micro_batch, seed=plan.seed
    )
    plain_nets(job)
    job.collate([samples[0]])
    warm_up()
    seed_all(plan.seed)
    before = limit.limit(plan.budget_bytes) if device.type == "cpu" else 0
    resident = limit.resident_bytes()
    try:
        rig = build(job, device, plan.implementation, rate=plan.learning_rate, warmup_windows=plan.warmup_windows)
        checkpoints = Checkpoints(folder.checkpoints, keep)
        first = resume(rig, plan, checkpoints, say, lengths=lengths is not None) if resumed else 0
        folder.keep_lines_before(first)
        last = windows or job.windows
        saver = Saver(
            checkpoints=checkpoints,
            plan=plan,
            lines=[folder.lines("samples"), folder.lines("metrics")],
            every=every,
            asynchronous=plan.checkpoint_writing == "asynchronous",
            say=say,
            written=first or None,
        )
        with Progress(first, last, plan) as shown:
            course = Course(
                plan=plan,
                folder=folder,
                samples=samples,
                lengths=lengths,
                windows=course_windows,
                first=first,
                last=last,
                resident_before=resident,
                saver=saver,
                show=shown.line,
            )
            return train(rig, course)
    except Exception as error:
        if not limit.is_memory_failure(error):
            raise
        limit.lift()
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(
            f"memfit: out of memory: {message[-160:]}; the budget is {format_size(plan.budget_bytes)} "
            f"over the {format_size(before)} held before; "
            "plan again with a smaller --micro-batch or a larger --memory, and go on with --resume",
            file=sys.stderr,
        )
        return Exit.STOPPED


def say(line: str) -> None:
    """One line on standard error."""
    print(f"memfit: {line}", file=sys.stderr, flush=True)


def device_of(plan: Plan) -> torch.device:
    """The device of this machine that a plan runs on, its memory limited to the plan's budget.

    Raises:
        InputError: the plan is for several devices, or for one that is not here.
    """
    if len(plan.micro_batches) > 1:
        raise InputError(
            f"plan for {len(plan.micro_batches)} devices",
            "memfit run trains on one device",
            "plan again with --devices 1",
        )
    if plan.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            f"plan for {plan.device}",
            "this machine has no CUDA device",
            "plan again with --device cpu or --memory SIZE",
        )
    torch.cuda.set_per_process_memory_fraction(
        min(plan.budget_bytes / torch.cuda.get_device_properties(0).total_memory, 1.0)
    )
    return torch.device("cuda")


def seed_all(seed: int) -> None:
    """Random numbers of every kind begin here."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def warm_up() -> None:
    """What libraries and thread pools take once, they take before the limit."""
    net = nn.Sequential(nn.Conv1d(4, 64, 3, padding=1), nn.GELU(), nn.Conv1d(64, 4, 3, padding=1), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        net(torch.randn(64, 4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
