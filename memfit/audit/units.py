"""The global batch that was meant, against the one that is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.audit.counts import Counts, by_window, declared
from memfit.audit.streams import AuditWorld, RankStream
from memfit.errors import InputError

SAMPLES = ("samples", "sample", "clips", "images", "sequences")
"""Units that count samples; any other one counts lengths."""


@dataclass(frozen=True, kw_only=True)
class Meant:
    """What one optimizer step was meant to learn from, over all ranks."""

    global_batch: int
    unit: str = "samples"

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(f"global batch {self.global_batch}", "a batch holds something", "write 1 or more")

    @property
    def in_samples(self) -> bool:
        return self.unit in SAMPLES


def unit_findings(world: AuditWorld, counts: Counts, alone: Counts, meant: Meant) -> Iterator[tuple[str, str]]:
    """(code, what was counted) where the global batch is another one than meant."""
    ranks, wanted = counts.world, meant.global_batch
    samples = _largest(counts.step_samples)
    units = _largest(counts.step_units)
    if not counts.draws:
        return
    mixed = _mixed_units(world, counts, meant, samples, units)
    if mixed:
        yield "frames-taken-for-samples", mixed
        return
    given = samples if meant.in_samples else units
    before = _largest(alone.step_samples if meant.in_samples else alone.step_units)
    if given is None or before is None:
        return
    micro = round(wanted / before)
    if micro > 1 and set(counts.windows) == {1} and _close(before * micro, wanted, meant) and given < 0.75 * wanted:
        yield (
            "step-counts-micro-batches",
            f"Every micro-batch is a step: one learns from {given:g} {meant.unit} over all ranks where {wanted} were "
            f"meant, which takes {micro} micro-batches on one rank. Training is that much shorter than it says.",
        )
    elif ranks > 1 and given > (wanted if meant.in_samples else 1.3 * wanted):
        yield (
            "global-given-as-per-gpu",
            f"{ranks} ranks take {given:g} {meant.unit} a step where {wanted} were meant: {_of_ranks(world, meant)}, "
            "and no accumulation makes that less.",
        )
    elif ranks > 1 and _close(given * ranks, before, meant):
        yield (
            "per-gpu-given-as-global",
            f"{ranks} ranks take {given:g} {meant.unit} a step, one rank alone takes {before:g}, and {wanted} were "
            "meant: the batch is divided by the number of ranks once too often.",
        )


def _mixed_units(world: AuditWorld, counts: Counts, meant: Meant, samples: float | None, units: float | None) -> str:
    """Where the number that was meant in one unit is found in the other; empty where it is not."""
    wanted, ranks = meant.global_batch, counts.world
    likely = {wanted, wanted * ranks, wanted / ranks}
    if samples is None:
        return ""
    if not meant.in_samples:
        number = samples if samples in likely else declared(world).batch_size
        right = units is not None and 0.7 * wanted / ranks <= units <= 1.3 * wanted * ranks
        if number not in likely or right:
            return ""
        held = f", which hold {units:g} {meant.unit}" if units else ""
        return f"{wanted} {meant.unit} were meant, and a batch counts {number:g} samples{held}."
    if units is None or samples > wanted / ranks / 2:
        return ""
    plain = [_largest(_unpadded(stream)) or 0.0 for stream in world.epochs[0]]
    held_by = [units, units / ranks, max(plain), max(plain) * ranks]
    if any(0.85 <= value / target <= 1.02 for value in held_by for target in likely):
        return f"{wanted} samples were meant, and a step holds {samples:g}: the number is taken for padded length."
    return ""


def _of_ranks(world: AuditWorld, meant: Meant) -> str:
    """The units that each rank takes in most of its steps."""
    loads = [stream.sizes if meant.in_samples else stream.padded() for stream in world.epochs[0]]
    known = [(stream, load) for stream, load in zip(world.epochs[0], loads, strict=True) if load is not None]
    usual = [_usual(by_window(stream, load)) for stream, load in known]
    if len(set(usual)) == 1:
        return f"in most steps each rank takes {usual[0]:g}"
    shown = ", ".join(f"{value:g}" for value in usual[:8])
    return f"in most steps the ranks take {shown}{' …' if len(usual) > 8 else ''}"


def _usual(loads: np.ndarray) -> float:
    """The value that most steps have; the median where all differ."""
    values, times = np.unique(loads, return_counts=True)
    if not len(values):
        return 0.0
    return float(values[times.argmax()]) if times.max() > 1 else float(np.median(loads))


def _unpadded(stream: RankStream) -> np.ndarray:
    """Units of each batch without its padding."""
    assert stream.lengths is not None
    return np.add.reduceat(stream.lengths, (np.cumsum(stream.sizes) - stream.sizes)[stream.sizes > 0])


def _largest(steps: np.ndarray | None) -> float | None:
    return None if steps is None or not len(steps) else float(steps.max())


def _close(given: float, target: float, meant: Meant) -> bool:
    return given == target if meant.in_samples else 0.75 <= given / target <= 1.1
