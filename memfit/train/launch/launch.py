"""Starts the training processes of a plan, and gives an exit code that what is on disk agrees with."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace

from memfit.child_process import no_orphans
from memfit.errors import Exit
from memfit.plan import Plan
from memfit.train.checkpoint.unfinished import drop_unfinished
from memfit.train.launch.crash_stacks import describe_crash
from memfit.train.launch.memory_limit import ENVIRONMENT
from memfit.train.launch.outcome import clear_outcome, missing_from, read_outcome, spare_folder
from memfit.train.launch.process_guard import for_child
from memfit.train.launch.supervisor import Supervisor, run_child
from memfit.train.launch.torchrun import restarts, torchrun
from memfit.train.launch.watchdog import clear_earlier, ranks_that_held, remove_temporary_stacks
from memfit.train.metrics_file import count_windows
from memfit.train.run_folder import RunFolder
from memfit.train.run_options import RunOptions

RANK = "memfit.train.launch.rank_entry"
COLLECTIVE_SECONDS = 1800
"""How long ranks wait for each other, which is torch's own default. A rank that hangs is ended before, by the watchdog;
one that is gone breaks the others' connections at once."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """How a launch ended."""

    code: int
    line: str = ""
    """What is left to say; empty where a training process has said it."""
    signalled: bool = False
    """Whether a signal to stop came."""


def worker_environment() -> dict[str, str]:
    """The environment of a process that trains.

    torch's C++ code logs no errors, which are frames of its stack: it raises them too.
    """
    ranks = {"MEMFIT_COLLECTIVE_SECONDS": str(COLLECTIVE_SECONDS), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return {**ranks, **os.environ, **ENVIRONMENT}


def become_rank(options: RunOptions) -> None:
    """Replaces this process, which torchrun started, by a rank of the run."""
    os.execve(sys.executable, [sys.executable, "-m", RANK, argument_of(options)], worker_environment())


def argument_of(options: RunOptions) -> str:
    """The options of a process in which the job may change the working folder."""
    return replace(options, folder=os.path.abspath(options.folder)).to_json()


def launch(plan: Plan, options: RunOptions) -> Launched:
    """Trains a plan in processes of its own, and waits for their end."""
    folder, ranks = RunFolder(options.folder), plan.ranks
    clear_earlier(folder)
    supervisor = Supervisor()
    with spare_folder():
        with no_orphans(), supervisor.guarding():
            if ranks > 1:
                os.environ.update({**worker_environment(), **for_child()})
                code = torchrun(ranks, RANK, [argument_of(options)], folder.path, restarts(plan))
            else:
                code = run_child(
                    [sys.executable, "-m", RANK, argument_of(options)], {**worker_environment(), **for_child()}
                )
        launched = judged(folder, code, supervisor)
    clean(folder)
    return replace(launched, signalled=supervisor.signalled is not None)


def clean(folder: RunFolder) -> None:
    """Removes what a launch leaves that nobody reads."""
    drop_unfinished(folder.checkpoints)
    remove_temporary_stacks(folder)
    clear_outcome(folder.path)


def judged(folder: RunFolder, code: int, supervisor: Supervisor, *, keeps_run: bool = True) -> Launched:
    """The exit code of a launch, by its outcome and by what is on disk.

    Args:
        keeps_run: whether the run is in this folder, and not in another node's.
    """
    again = f"go on with: memfit run {folder.plan} --out {folder.path} --resume"
    outcome = read_outcome(folder.path)
    was_stopped = supervisor.killed_early or (supervisor.signalled is not None and code == Exit.STOPPED)
    in_windows = folder.window_range.exists() and not supervisor.killed_early
    if was_stopped and outcome is None and not in_windows:
        return Launched(code=Exit.STOPPED, line=f"stopped before the first window; {again}")
    if supervisor.killed or (was_stopped and outcome is None):  # torchrun kills ranks that do not end
        return Launched(
            code=Exit.STOPPED, line=f"the run did not end after it was told to stop, and was killed; {again}"
        )
    if outcome is None and (held := ranks_that_held(folder)):
        what = "the run has made no progress in a call that holds Python's lock"
        return Launched(code=Exit.STOPPED, line=f"{what}; its stacks are in {', '.join(held)}; {again}")
    if outcome is None and code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
        what = f"the training process was killed by signal {-code} ({name}){describe_crash(folder)}"
        return Launched(code=Exit.STOPPED, line=f"{what}; {again}")
    if outcome is None:
        if code == Exit.STOPPED:
            return Launched(code=code)
        return Launched(
            code=Exit.STOPPED,
            line=f"the training ended by itself with exit code {code}, after {_trained(folder)}: "
            f"code of the job or of a library ends the process (os._exit); {again}",
        )
    if outcome.code == Exit.DONE and keeps_run:
        missing = missing_from(folder.path, outcome)
        if missing is not None:
            return Launched(code=Exit.STOPPED, line=f"the run is not done: {missing}; {again}")
    if outcome.code == Exit.FAULT and outcome.unsaid:
        return Launched(code=Exit.FAULT, line=f"the training process ended with a fault of memfit: {outcome.unsaid}")
    return Launched(code=outcome.code, line=outcome.unsaid)


def _trained(folder: RunFolder) -> str:
    """How far a run came, in words."""
    windows = count_windows(folder.lines("metrics"))
    return "no window" if windows == 0 else f"{windows} windows" if windows > 1 else "1 window"
