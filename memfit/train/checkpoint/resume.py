"""Going on with a run: the newest whole checkpoint put back, under its plan or another that takes the same samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memfit.apply.train_state import TrainState
from memfit.engine.collectives import gather
from memfit.errors import InputError, describe
from memfit.plan import Plan
from memfit.train.checkpoint.checkpoints import Checkpoint, Checkpoints, Say
from memfit.train.checkpoint.sharded_checkpoint import load_sharded
from memfit.train.checkpoint.state import put_back
from memfit.train.launch.memory_limit import is_memory_failure
from memfit.train.run_folder import check_same_samples, writing


def resume(train_state: TrainState, plan: Plan, checkpoints: Checkpoints, say: Say, *, lengths: bool = False) -> int:
    """Puts the newest whole checkpoint back; gives the next window, 0 where there is no checkpoint.

    On several ranks, every one reads the same; rank 0 clears away what is left over once all have read.

    Args:
        lengths: whether samples have lengths: then windows are packed by the micro-batch too.

    Raises:
        InputError: none is whole, or it is of another job or plan.
        CannotWriteError: what a killed process left behind cannot be cleared away.
    """
    checkpoint = checkpoints.newest(say)
    if checkpoint is not None:
        check_same_samples(checkpoint.plan, plan, checkpoint.path, ("micro_batch",) if lengths else ())
        if checkpoint.parts is not None:
            load_sharded(train_state, checkpoint.parts)
        elif train_state.engine.sharded_state:
            raise InputError(
                f"checkpoint {checkpoint.path}",
                f"it is in one file, and --engine {train_state.engine.name} reads parts",
                f"go on with engine {checkpoint.plan.engine!r}, as the plan in it has it",
            )
        else:
            restore(train_state, checkpoint)
    gather(train_state.engine, None)
    if train_state.engine.rank > 0:
        return checkpoint.next_window if checkpoint else 0
    with writing(checkpoints.path):
        checkpoints.clean(checkpoint.next_window if checkpoint else 0)
    return checkpoint.next_window if checkpoint else 0


def restore(train_state: TrainState, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's whole state into a train state.

    Raises:
        InputError: it is of another job.
    """
    with of_this_job(checkpoint):
        put_back(train_state, checkpoint.state, checkpoint.on(train_state.device), checkpoint.mapped)


@contextlib.contextmanager
def of_this_job(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns what ``put_back`` raises on another job's state into an InputError that names the checkpoint."""
    try:
        yield
    except (LookupError, RuntimeError, ValueError, AttributeError, TypeError, OverflowError) as error:
        if is_memory_failure(error):
            raise
        write = "take a checkpoint of this job, or start a new run in another --out"
        raise InputError(f"checkpoint {checkpoint.path}", f"it is of another job: {describe(error)}", write) from error
