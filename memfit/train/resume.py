"""Going on with a run: the newest whole checkpoint put back, under its plan or another that takes the same samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memfit.apply.rig import Rig
from memfit.engine.ranks import gather
from memfit.errors import InputError, describe
from memfit.plan import Plan
from memfit.train.checkpoints import Checkpoint, Checkpoints, Say
from memfit.train.folder import check_same_samples, writing
from memfit.train.limit import is_memory_failure
from memfit.train.spread import load_spread
from memfit.train.state import put_back


def resume(rig: Rig, plan: Plan, checkpoints: Checkpoints, say: Say, *, lengths: bool = False) -> int:
    """Puts the newest whole checkpoint back; gives the next window, 0 where there is no checkpoint.

    On several ranks, every one reads the same; rank 0 clears away what is left over once all have read.

    Args:
        lengths: whether samples have lengths: then windows are packed by the micro-batch too.

    Raises:
        InputError: none is whole, or it is of another job or plan.
        CannotWriteError: what a killed process left behind cannot be cleared away.
    """
    found = checkpoints.newest(say)
    if found is not None:
        check_same_samples(found.plan, plan, found.path, ("micro_batch",) if lengths else ())
        if found.parts is not None:
            load_spread(rig, found.parts)
        elif rig.engine.spread:
            raise InputError(
                f"checkpoint {found.path}",
                f"it is in one file, and --engine {rig.engine.name} reads parts",
                f"go on with engine {found.plan.engine!r}, as the plan in it has it",
            )
        else:
            restore(rig, found)
    gather(rig.engine, None)
    if rig.engine.rank > 0:
        return found.next_window if found else 0
    with writing(checkpoints.path):
        checkpoints.clean(found.next_window if found else 0)
    return found.next_window if found else 0


def restore(rig: Rig, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's whole state into a rig.

    Raises:
        InputError: it is of another job.
    """
    with of_this_job(checkpoint):
        put_back(rig, checkpoint.state, checkpoint.on(rig.device), checkpoint.lying)


@contextlib.contextmanager
def of_this_job(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns what ``put_back`` raises on another job's state into an InputError that names the checkpoint."""
    try:
        yield
    except (KeyError, RuntimeError, ValueError, AttributeError) as error:
        if is_memory_failure(error):
            raise
        write = "take a checkpoint of this job, or start a new run in another --out"
        raise InputError(f"checkpoint {checkpoint.path}", f"it is of another job: {describe(error)}", write) from error
