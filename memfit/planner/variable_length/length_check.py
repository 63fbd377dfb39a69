"""Varied lengths: whether a plan's windows fit one after the other, with the fragments that each leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.batch.dataset import lengths_of
from memfit.errors import InputError, describe
from memfit.geometry import Geometry
from memfit.job import Job
from memfit.plan import MemoryOption
from memfit.planner.variable_length.sequence import SequencePrediction, drawn_windows, predict_sequence
from memfit.sizes import format_size
from memfit.trace.step import Tracing
from memfit.wording import counted

EXPANDABLE = "expandable allocator"
WINDOWS = 200
"""Windows that are replayed: reserved memory seldom grows after the first hundred."""


@dataclass(frozen=True, kw_only=True)
class LengthCheck:
    """What the first windows come to, as ``memfit run`` draws them."""

    found: SequencePrediction | None
    unknown: str = ""
    """Why there is none."""

    @property
    def fits(self) -> bool:
        """With the allocator's segments as they are, or expandable; what is not known does."""
        found = self.found
        return found is None or found.plain.failed_window is None or found.expandable.failed_window is None

    @property
    def allocator(self) -> str:
        """As a plan has it."""
        failed = self.found is not None and self.found.plain.failed_window is not None
        return "expandable_segments" if failed and self.fits else "default"

    def levers(self) -> list[MemoryOption]:
        """Expandable segments, taken or left."""
        if self.found is None:
            return []
        plain, expandable = self.found.plain, self.found.expandable
        taken = self.allocator != "default"
        why = (
            f"window {plain.failed_window} asks for what lies in fragments"
            if taken
            else f"{counted(plain.windows, 'window')} of {counted(plain.distinct_shapes, 'shape')} fit without"
        )
        saves = max(plain.reserved_bytes - expandable.reserved_bytes, 0)
        return [
            MemoryOption(
                name=EXPANDABLE, taken=taken, saves_bytes=saves, costs="nothing", reason=why,
                saves={"train": saves}, seconds=0.0,
            )
        ]  # fmt: skip

    def reason(self) -> str:
        """In a sentence."""
        if self.found is None:
            return f"not replayed: {self.unknown}"
        plain = self.found.plain
        if not self.fits:
            return (
                f"alone, but window {plain.failed_window} not behind those before it, which leave fragments of other "
                "lengths, nor with expandable segments"
            )
        over = f"{counted(plain.windows, 'window')} of {counted(plain.distinct_shapes, 'shape')}"
        if self.allocator == "default":
            return f"over {over} {format_size(plain.reserved_bytes)} are reserved, {plain.ratio:.2f} x the allocated"
        return (
            f"expandable segments: without, window {plain.failed_window} does not fit; "
            f"with, {format_size(self.found.expandable.reserved_bytes)} are reserved at most"
        )


def check_lengths(
    job: Job, how: Tracing, geometry: Geometry, checkpointing: Mapping[str, str], seed: int
) -> LengthCheck | None:
    """The first ``WINDOWS`` windows on a card; None where lengths do not vary, or their fragments do not count."""
    device = how.device
    if job.longest is None or not device.is_cuda or geometry.data_parallel > 1:
        return None
    try:
        lengths = lengths_of(job)
    except InputError:
        raise
    except Exception as error:  # the data set may lie on another machine
        return LengthCheck(found=None, unknown=f"the job's lengths() raises {describe(error)}")
    if lengths is None or min(lengths) == max(lengths):
        return None
    windows = drawn_windows(
        job, lengths, global_batch=geometry.global_batch, micro_batch=geometry.micro_batch, count=WINDOWS, seed=seed
    )
    return LengthCheck(found=predict_sequence(job, device, windows, checkpointing, how))
