"""Geometry: how a global batch splits into micro-batches, accumulation and devices.

global batch = the sum of the micro-batches of one window over all data-parallel ranks
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from memfit.errors import InputError
from memfit.job import Shape

MOST = 2**31 - 1
"""Units of a batch: PyTorch's kernels index with 32 bits."""
MOST_MICRO_BATCHES = 1 << 20
"""Micro-batches of one window over all ranks, which a plan lists: 64 for each of 16,384 ranks."""


class HasUnit(Protocol):
    """A job, or what is known of one."""

    @property
    def unit(self) -> str:
        """What its batches are counted in."""

    @property
    def longest(self) -> int | None:
        """Units of its longest item; None where items have no length."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One window: the micro-batches of each data-parallel rank, in the job's unit."""

    unit: str
    global_batch: int
    micro_batch: int
    """The largest micro-batch, in units."""
    micro_batches: tuple[tuple[int, ...], ...]
    """For each rank, the sizes of its micro-batches, in units."""
    devices_each: int = 1
    """Devices that take the micro-batches of one rank together: parts of layers or stages, on a mesh."""

    def __post_init__(self) -> None:
        total = sum(map(sum, self.micro_batches))
        if total != self.global_batch:
            raise InputError(
                f"geometry of {total} {self.unit}",
                f"the micro-batches do not add up to {self.global_batch}",
                "make them sum to it",
            )

    @property
    def data_parallel(self) -> int:
        """Ranks that share the window."""
        return len(self.micro_batches)

    def arithmetic(self) -> str:
        """The split as a sum: ``64 = 12 x 5 + 4 on 1 device``, ``11 = 2 x 4 + 3 on 3 devices, at most 2 at once``,
        ``8 = 2 groups of 4 devices x (1 x 4)``."""
        first = self.micro_batches[0]
        full, rest = first.count(self.micro_batch), sum(first) - first.count(self.micro_batch) * self.micro_batch
        own = f"{full} x {self.micro_batch}" + (f" + {rest}" if rest else "")
        if self.data_parallel == 1:
            return f"{self.global_batch} = {own} on {self._devices()}"
        if len(set(self.micro_batches)) == 1:
            return f"{self.global_batch} = {self._devices()} x ({own})"
        shares = [(share, len(list(ranks))) for share, ranks in groupby(map(sum, self.micro_batches))]
        parts = " + ".join(f"{share}" if count == 1 else f"{count} x {share}" for share, count in shares)
        return f"{self.global_batch} = {parts} on {self._devices()}, at most {self.micro_batch} at once"

    def _devices(self) -> str:
        plural = "" if self.data_parallel == 1 else "s"
        if self.devices_each == 1:
            return f"{self.data_parallel} device{plural}"
        return f"{self.data_parallel} group{plural} of {self.devices_each} devices"


def split(global_batch: int, micro_batch: int, unit: str, ranks: int = 1, devices_each: int = 1) -> Geometry:
    """Splits a global batch over ranks and micro-batches, as ``rank_sizes`` has it.

    Args:
        ranks: those with samples of their own.
        devices_each: devices that take the same samples.
    """
    check_count("--global-batch", global_batch)
    check_count("--micro-batch", micro_batch)
    check_count("--devices", ranks)
    if global_batch < ranks:
        raise InputError(
            f"--global-batch {global_batch}",
            f"fewer than one of the {unit} for each of {ranks} devices",
            f"write {ranks} or more",
        )
    least = least_micro_batch(global_batch, ranks)
    if micro_batch < least:
        why = f"a window of {global_batch} {unit} has at most {MOST_MICRO_BATCHES} micro-batches"
        raise InputError(f"--micro-batch {micro_batch}", why, f"write {least} or more")
    sizes = rank_sizes(global_batch, micro_batch, ranks)
    return Geometry(
        unit=unit, global_batch=global_batch, micro_batch=max(sizes[0]), micro_batches=sizes, devices_each=devices_each
    )


def least_micro_batch(global_batch: int, ranks: int = 1) -> int:
    """The smallest micro-batch, in units, with which a window has no more than ``MOST_MICRO_BATCHES``."""
    share = -(-global_batch // ranks)
    return -(-share // max(MOST_MICRO_BATCHES // ranks, 1))


def rank_sizes(count: int, micro_batch: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """For each rank, the sizes of its micro-batches in a window of ``count`` samples or units: the rule for a split.

    Ranks get equal parts, the first ones one more where the count does not divide. A rank's micro-batches are full but
    for the last one. So rank 0 has the most of them, another rank at most one fewer, and none where it gets nothing.
    """
    low, more = divmod(count, ranks)
    parts = [low + (rank < more) for rank in range(ranks)]
    return tuple(tuple(min(micro_batch, part - start) for start in range(0, part, micro_batch)) for part in parts)


def counted_in(job: HasUnit) -> str:
    """What a length is counted in: the job's unit, which a job whose samples have a length may not have named."""
    return "units of length" if job.longest is not None and job.unit == "samples" else job.unit


def shape_of(job: HasUnit, units: int) -> Shape:
    """The shape of a micro-batch of so many units: samples, or the fewest equal items of at most the longest length."""
    check_count("--micro-batch", units)
    if job.longest is None:
        return Shape(items=units)
    items = -(-units // job.longest)
    return Shape(items=items, length=-(-units // items))


def parse_shape(text: str, job: HasUnit) -> Shape:
    """``8x400``: items x length; for a job whose samples have no length, ``8``."""
    try:
        numbers = [int(part) for part in text.lower().split("x")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise InputError(f"--shape {text}", "not items x length", "write a shape such as 8x400")
    if (len(numbers) == 2) != (job.longest is not None):
        wants = "items x length, such as 8x400" if job.longest else "items alone, such as 8"
        raise InputError(f"--shape {text}", f"this job's batches are counted in {counted_in(job)}", f"write {wants}")
    if math.prod(numbers) > MOST:
        raise InputError(f"--shape {text}", f"more than {MOST} {counted_in(job)}", "write a smaller shape")
    return Shape(items=numbers[0], length=numbers[1] if len(numbers) == 2 else None)


def check_count(option: str, value: int) -> None:
    """Raises InputError where a count is below 1."""
    if value < 1:
        raise InputError(f"{option} {value}", "a count starts at 1", f"write {option} 1 or more")
