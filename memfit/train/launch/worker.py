"""The process that trains: started by ``memfit run`` with a fixed mmap threshold, limited to the plan's budget."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memfit.apply.buffer_snapshot import CannotRepeatError
from memfit.apply.train_state import build
from memfit.batch.dataset import dataset_of, lengths_of
from memfit.batch.windows import Windows
from memfit.device.virtual import backend
from memfit.engine.factory import make_engine
from memfit.engine.process_group import is_lost_rank, join
from memfit.engine.torchrun_env import is_restart, torchrun_env
from memfit.errors import Exit, InputError, describe, mistake_in_job
from memfit.job import Job
from memfit.loading import load_job
from memfit.plan import Plan, read_plan
from memfit.sizes import format_size
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.resume import resume
from memfit.train.checkpoint.saver import Saver
from memfit.train.checkpoint.sharded_saver import ShardedSaver
from memfit.train.launch import memory_limit, torchrun
from memfit.train.launch.process_guard import alone_in, die_with_parent
from memfit.train.launch.rank_agreement import check_rank_agreement, rank_agreement_of
from memfit.train.launch.stop_signals import ends_at_once
from memfit.train.launch.warm_up import warm_up
from memfit.train.loop.loop import RunContext, SpoiledByTrialError, train
from memfit.train.loop.online_verify import OnlineVerify
from memfit.train.loop.rng import seed_all
from memfit.train.recovery.exactly_once import TornStepError
from memfit.train.recovery.recovery import SampleTooLargeError
from memfit.train.recovery.reduced_limits import (
    ReducedLimits,
    StartAgainError,
    read_reduced_limits,
    write_reduced_limits,
)
from memfit.train.run_folder import CannotWriteError, RunFolder

UNPROVEN = "MEMFIT_UNPROVEN"
"""Set for a process that starts again because the trial of its first window could not be undone."""


def main(arguments: list[str]) -> int:
    """Trains ``RUN/plan.toml``: RUN, windows (0: the job's own), resume or start, checkpoints kept, seconds between,
    whether a sample that does not fit alone is skipped or stops the run, and windows between proofs (0: none)."""
    defaults = ("2", "60", "stop", "0")
    path, windows, start_or_resume, keep, every, oversized, proofs = [*arguments, *defaults[len(arguments) - 3 :]]
    folder = RunFolder(path)
    ends_at_once()
    if torchrun_env() is not None:
        os.dup2(2, 1)
    try:
        resumed = start_or_resume == "resume" or is_restart()
        with _alone(folder):
            code = run(folder, int(windows), resumed, int(keep), float(every), oversized == "skip", int(proofs))
        if code == Exit.CHECK_FAILED:
            return _ends(folder, code, f"a window was not the same on one device; see {folder.lines('verified')}")
        return code if code == Exit.DONE else _ends(folder, code, "stopped; go on with --resume")
    except StartAgainError as error:
        say(str(error))
        return Exit.STOPPED
    except InputError as error:
        return _ends(folder, Exit.BAD_INPUT, str(error))
    except CannotWriteError as error:
        return _ends(folder, Exit.STOPPED, str(error))
    except Exception as error:
        if torchrun_env() is not None and is_lost_rank(error):
            say(f"rank {torchrun_env().rank} ends: another rank is gone: {describe(error)}")  # type: ignore[union-attr]
            return Exit.FAULT
        mistake = mistake_in_job(error)
        if mistake is None:
            raise
        return _ends(folder, Exit.BAD_INPUT, str(mistake))


def _alone(folder: RunFolder) -> AbstractContextManager[None]:
    """Rank 0 holds the folder for all."""
    place = torchrun_env()
    return alone_in(folder.path) if place is None or place.rank == 0 else nullcontext()


def _ends(folder: RunFolder, code: int, line: str) -> int:
    """Says why a run ends, on one of its ranks."""
    if torchrun_env() is None:
        if code != Exit.STOPPED or not line.startswith("stopped;"):
            say(line)
        return code
    return torchrun.ends(folder.path, code, line)


def run(
    folder: RunFolder, windows: int, resumed: bool, keep: int, every: float, skips: bool = False, proofs: int = 0
) -> Exit:
    """Trains a run's plan within its budget."""
    backend.register()
    if torchrun_env() is not None:
        join("unproven" if UNPROVEN in os.environ else "")
    plan = read_plan(folder.plan)
    _check_ranks(plan)
    device = device_of(plan)
    engine = make_engine(plan.engine, device, **plan.engine_choices)
    job = load_job(plan.job, dict(plan.settings), unit=plan.unit)
    seed_all(plan.seed)
    samples, lengths = dataset_of(job), lengths_of(job)
    course_windows = Windows(
        size=len(samples),
        lengths=lengths,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        seed=plan.seed,
        ranks=engine.world,
    )
    job.collate([samples[0]])
    warm_up(job, plan.micro_batch)
    seed_all(plan.seed)
    before = memory_limit.limit(plan.budget_bytes) if device.type == "cpu" else 0
    resident = memory_limit.resident_bytes()
    try:
        train_state = build(
            job, device, engine, plan.implementation, rate=plan.learning_rate, warmup_windows=plan.warmup_windows,
            optimizer_state=plan.optimizer_state, average=plan.average,
        )  # fmt: skip
        checkpoints = Checkpoints(folder.checkpoints, keep)
        first = (
            resume(train_state, plan, checkpoints, say if engine.rank == 0 else _silent, lengths=lengths is not None)
            if resumed
            else 0
        )
        last = windows or job.windows
        if engine.world > 1:
            chain = rank_agreement_of(engine, plan, course_windows, len(samples), first, last)
            check_rank_agreement(engine, chain)
            for line in chain.lines(plan) if engine.rank == 0 else ():
                say(line)
        saver: Saver | ShardedSaver | None = None
        lines = [folder.lines("samples"), folder.lines("metrics")]
        common: dict[str, Any] = {"checkpoints": checkpoints, "plan": plan, "lines": lines, "every": every}
        common |= {"say": say if engine.rank == 0 else _silent, "written": first or None}
        if engine.spread:
            saver = ShardedSaver(**common)
        elif engine.rank == 0:
            saver = Saver(**common, asynchronous=plan.checkpoint_writing == "asynchronous")
        if engine.rank == 0:
            folder.keep_lines_before(first)
            folder.write_course(first, last)
        context = RunContext(
            plan=plan,
            folder=folder,
            samples=samples,
            lengths=lengths,
            windows=course_windows,
            first=first,
            last=last,
            resident_before=resident,
            saver=saver,
            say=say if engine.rank == 0 else _silent,
            proves=UNPROVEN not in os.environ,
            skips=skips,
            less=read_reduced_limits(folder, plan),
            proof=_proof(folder, job, engine.world, proofs) if proofs else None,
        )
        code = train(train_state, context)
        return code if context.proof is None or context.proof.finish() or code != Exit.DONE else Exit.CHECK_FAILED
    except StartAgainError as error:
        memory_limit.lift()
        write_reduced_limits(folder, plan, error.less)
        again = f"all ranks start again from the newest checkpoint, {_words(error.less, plan.unit)}"
        raise StartAgainError(f"rank {engine.rank}: {error}; {again}", error.less) from None
    except SpoiledByTrialError as error:
        if engine.rank == 0:
            say(f"{error}: starting again without a trial of every phase")
        memory_limit.lift()
        os.environ[UNPROVEN] = "1"
        os.execv(sys.executable, sys.orig_argv)
    except (SampleTooLargeError, TornStepError, CannotRepeatError) as error:
        memory_limit.lift()
        _ends(folder, Exit.STOPPED, _what_to_do(error))
        return Exit.STOPPED
    except Exception as error:
        if not memory_limit.is_memory_failure(error):
            raise
        memory_limit.lift()
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        text = (
            f"out of memory: {message[-160:]}; the budget is {format_size(plan.budget_bytes)} "
            f"over the {format_size(before)} held before; "
            "plan again with a smaller --micro-batch or a larger --memory, and go on with --resume"
        )
        _ends(folder, Exit.STOPPED, text)
        return Exit.STOPPED


def _proof(folder: RunFolder, job: Job, ranks: int, every: int) -> OnlineVerify:
    """Raises InputError where no one device holds what the ranks train."""
    if job.unsynchronised and ranks > 1:
        why = f"each rank trains {', '.join(job.unsynchronised)} by itself, and no one device holds them all"
        raise InputError(f"--verify-every {every}", why, "leave it out, and see memfit verify")
    return OnlineVerify(run=folder.path, every=every, say=say)


def _words(less: ReducedLimits, unit: str) -> str:
    if less.most is not None:
        return f"with micro-batches of at most {less.most} {unit}"
    if less.left_out:
        return f"without samples {', '.join(map(str, less.left_out))}"
    return "with less in validation" if less.validates else "without validation"


def _what_to_do(error: Exception) -> str:
    if isinstance(error, SampleTooLargeError):
        return f"{error}; give it more --memory, or leave it out with --oversized skip, and go on with --resume"
    if isinstance(error, TornStepError):
        return f"an optimizer step was cut short by memory: {error}; go on from the last checkpoint with --resume"
    return f"{error}; go on from the last checkpoint with --resume"


def say(line: str) -> None:
    """One line on standard error."""
    print(f"memfit: {line}", file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    """On the ranks that rank 0 speaks for."""


def _check_ranks(plan: Plan) -> None:
    """Whether as many processes were started as the plan has devices."""
    place, ranks = torchrun_env(), len(plan.micro_batches)
    if (place.world if place is not None else 1) != ranks:
        raise InputError(
            f"plan for {ranks} devices",
            f"torchrun started {place.world} processes" if place is not None else "it was started in one process",
            f"start it with torchrun --nproc-per-node {ranks}, or memfit run, or plan again with --devices",
        )


def device_of(plan: Plan) -> torch.device:
    """The device of this machine that a plan runs on, its memory limited to the plan's budget.

    Raises:
        InputError: the plan is for a device that is not here.
    """
    place = torchrun_env()
    if plan.device == "cpu":
        return torch.device("cpu")
    local = place.local_rank if place is not None else 0
    if torch.cuda.device_count() <= local:
        raise InputError(
            f"plan for {plan.device}",
            f"this machine has {torch.cuda.device_count() or 'no'} CUDA devices, and rank {local} of it needs its own",
            "plan again with --device cpu or --memory SIZE",
        )
    torch.cuda.set_device(local)
    torch.cuda.set_per_process_memory_fraction(
        min(plan.budget_bytes / torch.cuda.get_device_properties(local).total_memory, 1.0)
    )
    return torch.device("cuda", local)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:]))
