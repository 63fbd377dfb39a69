"""Length check: whether a plan's windows of varied lengths fit one after the other, with fragmentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.batch.dataset import lengths_of
from memfit.errors import InputError, describe
from memfit.geometry import Geometry, counted_in
from memfit.job import Job
from memfit.plan import MemoryOption
from memfit.planner.request import PlanRequest
from memfit.planner.variable_length.sequence import SequencePrediction, drawn_windows, predict_sequence
from memfit.sizes import format_size
from memfit.trace.step import Tracing
from memfit.wording import counted

EXPANDABLE = "expandable allocator"
WINDOWS = 200
"""Number of windows to replay: reserved memory seldom grows after the first hundred."""


@dataclass(frozen=True, kw_only=True)
class LengthCheck:
    """Memory of the first windows, as ``memfit run`` draws them."""

    sequence: SequencePrediction | None
    unknown: str = ""
    """Why there is none."""

    @property
    def fits(self) -> bool:
        """Whether the windows fit with default or with expandable segments; true where that is unknown."""
        sequence = self.sequence
        return sequence is None or sequence.plain.failed_window is None or sequence.expandable.failed_window is None

    @property
    def allocator(self) -> str:
        """The allocator setting for the plan."""
        failed = self.sequence is not None and self.sequence.plain.failed_window is not None
        return "expandable_segments" if failed and self.fits else "default"

    def options(self) -> list[MemoryOption]:
        """The option of expandable segments."""
        if self.sequence is None:
            return []
        plain, expandable = self.sequence.plain, self.sequence.expandable
        applied = self.allocator != "default"
        why = (
            f"without it, window {plain.failed_window} fails because of fragmentation"
            if applied
            else f"{counted(plain.windows, 'window')} of {counted(plain.distinct_shapes, 'shape')} fit without it"
        )
        saves = max(plain.reserved_bytes - expandable.reserved_bytes, 0)
        return [
            MemoryOption(
                name=EXPANDABLE, applied=applied, saves_bytes=saves, costs="nothing", reason=why,
                saves={"train": saves}, seconds=0.0,
            )
        ]  # fmt: skip

    def reason(self) -> str:
        """The reason that a plan gives."""
        if self.sequence is None:
            return f"not replayed: {self.unknown}"
        plain = self.sequence.plain
        if not self.fits:
            return (
                f"each window fits alone, but window {plain.failed_window} fails after those before it because of "
                "fragmentation, with expandable segments too"
            )
        over = f"{counted(plain.windows, 'window')} of {counted(plain.distinct_shapes, 'shape')}"
        if self.allocator == "default":
            return f"{over} reserve {format_size(plain.reserved_bytes)}, {plain.ratio:.2f} x the allocated bytes"
        return (
            f"expandable segments: window {plain.failed_window} does not fit without them; "
            f"with them at most {format_size(self.sequence.expandable.reserved_bytes)} are reserved"
        )


def check_longest(job: Job, request: PlanRequest) -> None:
    """Checks the job's lengths before a search. The data set may lie on another machine: then nothing is checked.

    Raises:
        InputError: ``lengths()`` gave something else than whole numbers above 0, or a sample is longer than the job's
            ``longest`` or than the largest micro-batch, so that the plan could not run.
    """
    if job.longest is None:
        return
    try:
        lengths = lengths_of(job)
    except InputError:
        raise
    except Exception:
        return
    if lengths is None:
        return
    longest = max(lengths)
    seen = f"sample {lengths.index(longest)} of length {longest}"
    if longest > job.longest:
        write = f"write longest = {longest} in the job, or leave the sample out of the data set"
        raise InputError(seen, f"longer than {type(job).__name__}.longest, which is {job.longest}", write)
    most = request.micro_batch or -(-request.global_batch // request.devices)
    if longest > most:
        option = (
            f"--global-batch {longest * request.devices}" if request.micro_batch is None else f"--micro-batch {longest}"
        )
        write = f"write {option} or more, in {counted_in(job)}"
        raise InputError(seen, f"longer than the largest micro-batch, {most} {counted_in(job)}", write)


def check_lengths(
    job: Job, how: Tracing, geometry: Geometry, checkpointing: Mapping[str, str], seed: int
) -> LengthCheck | None:
    """Replays a card's first ``WINDOWS`` windows; None where lengths do not vary or fragmentation does not matter."""
    device = how.device
    if job.longest is None or not device.is_cuda or geometry.data_parallel > 1:
        return None
    try:
        lengths = lengths_of(job)
    except InputError:
        raise
    except Exception as error:  # the data set may lie on another machine
        return LengthCheck(sequence=None, unknown=f"the job's lengths() raises {describe(error)}")
    if lengths is None or min(lengths) == max(lengths):
        return None
    windows = drawn_windows(
        job, lengths, global_batch=geometry.global_batch, micro_batch=geometry.micro_batch, count=WINDOWS, seed=seed
    )
    return LengthCheck(sequence=predict_sequence(job, device, windows, checkpointing, how))
