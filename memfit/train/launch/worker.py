"""The process that trains: started by ``memfit run`` with a fixed mmap threshold, limited to the plan's budget.

``memfit.train.launch.rank_entry`` calls ``main`` here.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from memfit.apply.buffer_snapshot import CannotRepeatError
from memfit.apply.carried_state import CarriedState
from memfit.apply.train_state import TrainState, build
from memfit.device.virtual import backend
from memfit.engine.collectives import gather
from memfit.engine.factory import make_engine
from memfit.engine.lost_rank import describe_loss, is_lost_rank
from memfit.engine.process_group import join, join_alone
from memfit.engine.protocol import Engine
from memfit.engine.torchrun_env import is_restart, torchrun_env
from memfit.errors import Exit, InputError, describe, mistake_in_job
from memfit.garbage import freeze_loaded
from memfit.job import Job
from memfit.plan import Plan, read_plan
from memfit.sizes import format_size
from memfit.torch_compat.versions import refuse_sharded_ranks
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.resume import resume
from memfit.train.checkpoint.saver import Saver
from memfit.train.checkpoint.sharded_saver import ShardedSaver
from memfit.train.data.device_copies import DeviceCopies
from memfit.train.data.loader import WorkerDiedError
from memfit.train.data.run_data import RunData, load_run_data
from memfit.train.data.stream import StreamSamples
from memfit.train.launch import memory_limit
from memfit.train.launch.crash_stacks import writing_crash_stacks
from memfit.train.launch.ending import (
    Ending,
    closed_descriptor,
    ended_by_job,
    proof_of,
    reduced_words,
    resume_command,
    what_to_do,
)
from memfit.train.launch.node_folders import NodeFolders, collect_parts, node_folders, send_run
from memfit.train.launch.outcome import Outcome, is_heard, keep_stderr, read_outcome, say, write_outcome
from memfit.train.launch.plan_device import device_of_plan
from memfit.train.launch.process_guard import alone_in
from memfit.train.launch.rank_agreement import check_rank_agreement, rank_agreement_of
from memfit.train.launch.rank_cards import card_of, check_rank_cards
from memfit.train.launch.start_again import changed_in_trial, start_again_alone, start_again_unproven
from memfit.train.launch.stop_signals import ends_at_once
from memfit.train.launch.watchdog import Watchdog, clear_earlier
from memfit.train.loop.loop import GivenUpError, SpoiledByTrialError, train
from memfit.train.loop.online_verify import OnlineVerify
from memfit.train.loop.run_context import RunContext
from memfit.train.loop.validation_data import no_real_samples
from memfit.train.recovery.exactly_once import TornStepError
from memfit.train.recovery.failure import describe_memory_failure
from memfit.train.recovery.giving_up import GIVES_UP
from memfit.train.recovery.reduced_limits import (
    NO_REDUCTION,
    StartAgainError,
    forget_earlier_stop,
    read_reduced_limits,
    write_reduced_limits,
)
from memfit.train.run_folder import CannotWriteError, RunFolder
from memfit.train.run_options import RunOptions


def main(options: RunOptions) -> int:
    """Trains ``options.folder``/plan.toml; gives the exit code, and writes the launch's outcome."""
    folder, place = RunFolder(options.folder), torchrun_env()
    keep_stderr()
    ends_at_once(lambda: _stopped_early(folder))
    if place is not None:
        os.dup2(2, 1)
    try:
        with _alone(folder):
            if place is None:  # of several ranks, whoever starts them does: another may have written before this one
                clear_earlier(folder)
            rank = place.rank if place is not None else 0
            watchdog = Watchdog(
                folder,
                rank=rank,
                world=place.world if place is not None else 1,
                patience=options.patience,
            )
            with writing_crash_stacks(folder, rank), watchdog.watching():
                return _ended(folder, run(folder, options, watchdog))
    except StartAgainError as error:
        say(str(error))
        return Exit.STOPPED
    except InputError as error:
        return _ends(folder, Exit.BAD_INPUT, str(error))
    except CannotWriteError as error:
        return _ends(folder, Exit.STOPPED, str(error))
    except Exception as error:
        closed = closed_descriptor(error)
        if closed is None and place is not None and is_lost_rank(error):
            if read_outcome(folder.path) is None:  # else that rank has said why it ended
                say(f"rank {place.rank} ends: another rank is gone: {describe_loss(error)}")
            return Exit.FAULT
        mistake = mistake_in_job(error) or closed
        if mistake is None:
            write_outcome(folder.path, Outcome(code=Exit.FAULT, unsaid="" if is_heard() else describe(error)))
            raise
        return _ends(folder, Exit.BAD_INPUT, str(mistake))
    except BaseException as error:
        return _ends(folder, Exit.BAD_INPUT, ended_by_job(error))


def _stopped_early(folder: RunFolder) -> None:
    _ends(folder, Exit.STOPPED, f"stopped before the first window; {resume_command(folder)}")


def _alone(folder: RunFolder) -> AbstractContextManager[None]:
    """Rank 0 holds the folder for all."""
    place = torchrun_env()
    return alone_in(folder.checkpoints) if place is None or place.rank == 0 else nullcontext()


def _ended(folder: RunFolder, ending: Ending) -> int:
    """Writes the outcome of a training that came to its end or was stopped; gives the exit code."""
    code, context = ending.code, ending.context
    if ending.line:
        return _ends(folder, code, ending.line)
    if code == Exit.CHECK_FAILED:
        return _ends(folder, code, "a check failed during the run; see the lines above")
    if code == Exit.STOPPED:
        return _ends(folder, code, f"stopped; {resume_command(folder)}")
    if context is not None and context.saver is not None and (torchrun_env() is None or _rank() == 0):
        write_outcome(folder.path, proof_of(context))
    return code


def _rank() -> int:
    place = torchrun_env()
    return 0 if place is None else place.rank


def _ends(folder: RunFolder, code: int, line: str) -> int:
    """Writes and says why a run ends, on the first of its ranks that does."""
    write_outcome(folder.path, Outcome(code=code), line)
    return code


def run(folder: RunFolder, options: RunOptions, watchdog: Watchdog) -> Ending:
    """Trains a run's plan within its budget."""
    backend.register_virtual_device()
    if torchrun_env() is not None:
        join("" if changed_in_trial() is None else "unproven")
    else:
        join_alone()
    plan = read_plan(folder.plan)
    _check_ranks(plan)
    if _rank() == 0:
        forget_earlier_stop(folder, plan)
    device = device_of_plan(plan)
    refuse_sharded_ranks(plan.engine, device.type)
    engine = make_engine(plan.engine, device, plan.mesh_shape, **plan.engine_choices)
    check_rank_cards(plan, gather(engine, card_of(device)))
    data = load_run_data(plan, engine, options.workers)
    if data.loader is not None:
        watchdog.worker_stacks = data.loader.stacks
    freeze_loaded()
    before = memory_limit.limit(plan.budget_bytes) if device.type == "cpu" else 0
    try:
        return _train(folder, options, watchdog, plan=plan, device=device, engine=engine, data=data)
    except StartAgainError as error:
        memory_limit.lift()
        _start_again(folder, plan, engine, options, error, before)
    except SpoiledByTrialError as error:
        if engine.rank == 0:
            say(f"{error}: starting again without a trial of every phase")
        memory_limit.lift()
        start_again_unproven(error.names)
    except GivenUpError:
        limits = read_reduced_limits(folder, plan)
        return Ending(code=Exit(limits.code), line=limits.reason)
    except (*GIVES_UP, TornStepError, CannotRepeatError, WorkerDiedError) as error:
        if isinstance(error, WorkerDiedError) and engine.world > 1:
            line = f"rank {engine.rank}: {error}; all ranks start again from the newest checkpoint"
            raise StartAgainError(line, NO_REDUCTION) from error
        memory_limit.lift()
        return Ending(code=Exit.STOPPED, line=what_to_do(error))
    except Exception as error:
        if not memory_limit.is_memory_failure(error):
            raise
        memory_limit.lift()
        return Ending(code=Exit.STOPPED, line=_out_of_memory(error, plan, before))
    finally:
        if data.loader is not None:
            data.loader.close()


def _start_again(
    folder: RunFolder, plan: Plan, engine: Engine, options: RunOptions, error: StartAgainError, before: int
) -> NoReturn:
    """Writes down with what the run starts again. torchrun starts the ranks; one device is this process, replaced.

    Args:
        before: bytes that the process held before its memory was limited.

    Raises:
        StartAgainError: on several ranks, with a line for a person.
    """
    limits, why, rank = error.limits, error.__cause__, f"rank {engine.rank}: " if engine.world > 1 else ""
    if limits.stops_before is not None and isinstance(why, Exception):
        gave_up = isinstance(why, (*GIVES_UP, InputError))
        reason = what_to_do(why) if gave_up else _out_of_memory(why, plan, before)
        code = Exit.BAD_INPUT if isinstance(why, InputError) else Exit.STOPPED
        limits = replace(limits, reason=f"{'' if reason.startswith('rank ') else rank}{reason}", code=code)
    write_reduced_limits(folder, plan, limits)
    who = "all ranks start" if engine.world > 1 else "the run starts"
    again = f"{rank}{error}; {who} again from the newest checkpoint, {reduced_words(limits, plan.unit)}"
    if engine.world > 1:
        raise StartAgainError(again, limits) from None
    say(again)
    start_again_alone(options)


def _out_of_memory(error: Exception, plan: Plan, before: int) -> str:
    """What is said of a memory failure where nothing can be made smaller."""
    return (
        f"out of memory: {describe_memory_failure(error)}; the budget is {format_size(plan.budget_bytes)} "
        f"over the {format_size(before)} held before; "
        "plan again with a smaller --micro-batch or a larger --memory, and go on with --resume"
    )


def _train(
    folder: RunFolder,
    options: RunOptions,
    watchdog: Watchdog,
    *,
    plan: Plan,
    device: torch.device,
    engine: Engine,
    data: RunData,
) -> Ending:
    """Builds the nets, puts the newest checkpoint back, and trains."""
    memory = memory_limit.ProcessMemory()
    train_state = build(
        data.job, device, engine, plan.implementation, rate=plan.learning_rate, warmup_windows=plan.warmup_windows,
        optimizer_state=plan.optimizer_state, average=plan.average,
    )  # fmt: skip
    train_state.carried = CarriedState(train_state)
    speaks = say if engine.rank == 0 else _silent
    checkpoints = Checkpoints(folder.checkpoints, options.keep)
    first, last = 0, options.windows or data.job.windows
    folders = node_folders(engine)
    goes_on = any(gather(engine, options.resume or is_restart()))
    if folders.separate and goes_on:
        send_run(engine, folders, folder, plan)
    if goes_on:
        first = resume(train_state, plan, checkpoints, speaks, lengths=data.lengths is not None)
    if first > last:
        seen = f"--windows {options.windows}" if options.windows else f"{data.job.windows} windows of the job"
        raise InputError(seen, f"the run has trained {first} already", f"write --windows {first} or more")
    _agree(engine, plan, data, first, last)
    if engine.rank == 0:
        for lost in folder.keep_lines_before(first):
            say(lost)
        folder.write_window_range(first, last)
    if data.job.validates and data.validation is None:
        speaks(f"the run does not validate: {no_real_samples(data.job)}")
    limits = read_reduced_limits(folder, plan)
    context = RunContext(
        plan=plan,
        folder=folder,
        samples=data.samples,
        lengths=data.lengths,
        windows=data.windows,
        first=first,
        last=last,
        memory=memory,
        saver=_saver(train_state, plan, folder, checkpoints, options, first, folders),
        say=speaks,
        proves=changed_in_trial() is None and limits.stops_before is None,
        changing=changed_in_trial() or (),
        skips=options.skip_oversized,
        limits=limits,
        validation=data.validation,
        proof=_proof(folder, data.job, engine.world, options.verify_every) if options.verify_every else None,
        progress=watchdog.progress,
        loader=data.loader,
        copies=_copies(plan, device, data),
    )
    code = train(train_state, context)
    if context.proof is not None and not context.proof.finish() and code == Exit.DONE:
        line = f"a window was not the same on one device; see {folder.lines('verified')}"
        return Ending(code=Exit.CHECK_FAILED, line=line)
    return Ending(code=code, context=context)


def _agree(engine: Engine, plan: Plan, data: RunData, first: int, last: int) -> None:
    """Raises InputError where the ranks are not in one run; rank 0 says what they agree on."""
    if engine.world > 1:
        agreement = rank_agreement_of(
            engine,
            plan,
            data.windows,
            size=0 if isinstance(data.samples, StreamSamples) else len(data.samples),
            first=first,
            last=last,
            first_sample=data.first_sample,
        )
        check_rank_agreement(engine, agreement)
        for line in agreement.lines(plan) if engine.rank == 0 else ():
            say(line)


def _saver(
    train_state: TrainState,
    plan: Plan,
    folder: RunFolder,
    checkpoints: Checkpoints,
    options: RunOptions,
    first: int,
    folders: NodeFolders,
) -> Saver | ShardedSaver | None:
    """The saver of this rank; None where rank 0 alone saves."""
    engine = train_state.engine
    common: dict[str, Any] = {
        "checkpoints": checkpoints,
        "plan": plan,
        "lines": [folder.lines("samples"), folder.lines("metrics")],
        "every": options.save_every,
        "say": say if engine.rank == 0 else _silent,
        "written": first or None,
    }
    if engine.sharded_state:
        return ShardedSaver(**common, collect=partial(collect_parts, engine, folders), clears=folders.writers)
    if engine.rank == 0:
        return Saver(**common, asynchronous=plan.checkpoint_writing == "asynchronous")
    return None


def _copies(plan: Plan, device: torch.device, data: RunData) -> DeviceCopies | None:
    """What copies the batches of workers to a card; None on a CPU, and where this process reads."""
    if device.type != "cuda" or data.loader is None:
        return None
    return DeviceCopies(device, beside=plan.copy_ahead_bytes > 0)


def _proof(folder: RunFolder, job: Job, ranks: int, every: int) -> OnlineVerify:
    """Raises InputError where no single device holds what the ranks train."""
    if job.unsynchronised and ranks > 1:
        why = f"each rank trains {', '.join(job.unsynchronised)} by itself, and no one device holds them all"
        raise InputError(f"--verify-every {every}", why, "leave it out, and see memfit verify")
    return OnlineVerify(run=folder.path, every=every, say=say)


def _silent(line: str) -> None:
    """Says nothing: rank 0 speaks for the other ranks."""


def _check_ranks(plan: Plan) -> None:
    """Whether as many processes were started as the plan has devices."""
    place, ranks = torchrun_env(), plan.ranks
    if (place.world if place is not None else 1) != ranks:
        raise InputError(
            f"plan for {ranks} devices",
            f"torchrun started {place.world} processes" if place is not None else "it was started in one process",
            f"start it with torchrun --nproc-per-node {ranks}, or memfit run, or plan again with --devices",
        )
