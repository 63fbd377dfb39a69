"""How a training ends: what it has left on disk, what is said, and how to go on."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from memfit.errors import Exit, InputError, chain_of
from memfit.train.data.reader import ended_in_worker
from memfit.train.launch.outcome import Outcome
from memfit.train.loop.run_context import RunContext
from memfit.train.recovery.exactly_once import TornStepError
from memfit.train.recovery.giving_up import NothingLeftError, SampleTooLargeError
from memfit.train.recovery.memory_growth import GrownMemoryError
from memfit.train.recovery.reduced_limits import ReducedLimits
from memfit.train.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the training ended, with the context that it had."""

    code: Exit
    line: str = ""
    """What is said; empty: the code says it."""
    context: RunContext | None = None


def proof_of(context: RunContext) -> Outcome:
    """What a run that is done has left on disk."""
    saver, final = context.saver, context.folder.path / "final"
    assert saver is not None
    return Outcome(
        code=Exit.DONE,
        windows=context.last,
        trained=max(context.last - context.first, 0),
        checkpoint=saver.checkpoints.folder(context.last).name if saver.written == context.last else None,
        final={path.name: path.stat().st_size for path in sorted(final.glob("*.safetensors"))},
    )


def resume_command(folder: RunFolder) -> str:
    """How to go on with a run."""
    return f"go on with: memfit run {folder.plan} --out {folder.path} --resume"


def ended_by_job(error: BaseException) -> str:
    """What is said where the job's code ends the process."""
    failure = ended_in_worker(error)
    return str(InputError(failure.seen, failure.why, failure.write))


def closed_descriptor(error: BaseException) -> InputError | None:
    """A descriptor of memfit's or a library's that is closed, as a mistake of the job, which alone closes others'."""
    if not any(isinstance(link, OSError) and link.errno == errno.EBADF for link in chain_of(error)):
        return None
    return InputError(
        "a file descriptor that the run needs is closed",
        "code of the job closes descriptors that it did not open, such as with os.closerange",
        "close only what the job opens, and go on with --resume",
    )


def reduced_words(limits: ReducedLimits, unit: str) -> str:
    """With what the ranks start again."""
    if limits.stops_before is not None:
        return f"to write a checkpoint of window {limits.stops_before} and stop"
    if limits.most is not None:
        return f"with micro-batches of at most {limits.most} {unit}"
    if limits.left_out:
        return f"without samples {', '.join(map(str, limits.left_out))}"
    return "with less in validation" if limits.validates else "without validation"


def what_to_do(error: Exception) -> str:
    """Why a run stops that cannot go on by itself, and what its owner can do."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, SampleTooLargeError):
        return f"{error}; give it more --memory, or leave it out with --oversized skip, and go on with --resume"
    if isinstance(error, GrownMemoryError):
        return f"{error}; no sample is to blame: free what the job keeps, and go on with --resume"
    if isinstance(error, NothingLeftError):
        return f"{error}; plan again with a larger --memory, and go on with --resume"
    if isinstance(error, TornStepError):
        return f"an optimizer step was cut short by memory: {error}; go on from the last checkpoint with --resume"
    return f"{error}; go on from the last checkpoint with --resume"
