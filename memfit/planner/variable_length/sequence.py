"""Variable length: what a run's windows come to, one after the other, in the card's caching allocator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memfit.batch.dataset import dataset_of, lengths_of
from memfit.batch.lengths import as_lengths
from memfit.batch.windows import Windows
from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError, why_unreadable
from memfit.geometry import MOST
from memfit.job import Job, Shape
from memfit.replay.allocator_config import AllocatorConfig
from memfit.replay.window_sequence import SequencePeaks, Window, replay_sequence
from memfit.trace.step import Tracing, trace_family
from memfit.trace.trace_family import TraceFamily

MOST_WINDOWS = 1_000_000
"""Windows that are drawn to be replayed: each takes some 500 bytes, and longer runs are not published."""


@dataclass(frozen=True, kw_only=True)
class SequencePrediction:
    """A sequence of windows without and with expandable segments. Where one does not fit, its peaks are those of a
    device without a limit, and its failed window the first that asks for what this one does not have."""

    plain: SequencePeaks
    expandable: SequencePeaks


def drawn_windows(
    job: Job, lengths: Sequence[int] | None, *, global_batch: int, micro_batch: int, count: int, seed: int = 0
) -> list[Window]:
    """The shapes of the first ``count`` windows (0: of the first epoch) that ``memfit run`` would draw.

    Args:
        lengths: units of each sample; None: the job's own data set is asked.

    Raises:
        InputError: more than ``MOST_WINDOWS``.
    """
    sample_lengths = lengths_of(job) if lengths is None else as_lengths(lengths).tolist()
    size = len(dataset_of(job)) if sample_lengths is None else len(sample_lengths)
    windows = Windows(size=size, lengths=sample_lengths, global_batch=global_batch, micro_batch=micro_batch, seed=seed)
    total = count or windows.per_epoch(0)
    if total > MOST_WINDOWS:
        why = f"{total} windows are more than the {MOST_WINDOWS} that memfit replays"
        raise InputError(f"--epoch {count}", why, f"write --epoch {MOST_WINDOWS}, or fewer")
    return [
        tuple(
            Shape(items=len(ids), length=None if sample_lengths is None else max(int(sample_lengths[i]) for i in ids))
            for ids in windows.window(number).micro_batches
        )
        for number in range(total)
    ]


def read_shapes(path: str | Path) -> list[Window]:
    """Windows from a text file: a line for each, with its micro-batches as BxL (or B), apart by spaces.

    Raises:
        InputError: no such file, or a line that is no such window.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = f"it cannot be read: {why_unreadable(error)}"
        raise InputError(f"--shapes {path}", why, "write the path of a text file, a window in each line") from error
    windows = [_window(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not windows:
        raise InputError(f"--shapes {path}", "no window in it", "write a line such as 8x400 for each window")
    return windows


def _window(line: str, where: str) -> Window:
    window = []
    for word in line.split():
        numbers = word.lower().split("x")
        if len(numbers) > 2 or not all(_is_size(number) for number in numbers):
            raise InputError(f"{where}: {word!r}", "not items x length", "write 8x400, or 8 where items have no length")
        window.append(Shape(items=int(numbers[0]), length=int(numbers[1]) if len(numbers) == 2 else None))
    return tuple(window)


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18 and 0 < int(text) <= MOST


def predict_sequence(
    job: Job,
    device: Device,
    windows: Sequence[Window],
    checkpointing: Mapping[str, str],
    like: Tracing | None = None,
) -> SequencePrediction:
    """Windows through the device's allocator, without and with expandable segments.

    Args:
        like: how the rest is traced; None: as the job has it.

    Scratch that operators allocate inside of themselves on a GPU is in; validation and saving are not.

    Raises:
        InputError: the device is no card, or the windows' shapes are not the job's.
    """
    if not device.is_cuda:
        raise InputError(f"a sequence on {device.key}", "only a card caches blocks", "write --device NAME of a card")
    _check(job, {shape for window in windows for shape in window})
    several = max(len(window) for window in windows) > 1
    how = replace(
        like or Tracing(device=device), device=device, micro_batches=2 if several else 1, checkpointing=checkpointing
    )
    family = trace_family(job, how, windows[0][0])
    capacity = None if device.usable_bytes is None else device.usable_bytes - (device.context_bytes or 0)
    plain, expandable = (
        _within(family, windows, capacity, AllocatorConfig(expandable_segments=expandable))
        for expandable in (False, True)
    )
    return SequencePrediction(plain=plain, expandable=expandable)


def _within(
    family: TraceFamily, windows: Sequence[Window], capacity: int | None, config: AllocatorConfig
) -> SequencePeaks:
    peaks = replay_sequence(family, windows, config=config)
    if capacity is None or peaks.reserved_bytes <= capacity:
        return peaks
    limited = replay_sequence(family, windows, config=config, capacity=capacity)
    return limited if limited.failed_window is None else replace(peaks, failed_window=limited.failed_window)


def _check(job: Job, shapes: Iterable[Shape]) -> None:
    for shape in shapes:
        if (shape.length is None) != (job.longest is None):
            write = "write items alone" if job.longest is None else "write items x length"
            raise InputError(
                f"shape {shape}", f"the job's items have {'no' if job.longest is None else 'a'} length", write
            )


def read_lengths(source: str) -> Sequence[int]:
    """Lengths from ``FILE:COLUMN`` of a .csv, .tsv or .jsonl file, in whole units."""
    from memfit.batch.lengths import column_lengths

    path, colon, column = source.rpartition(":")
    if not colon or not path:
        raise InputError(f"--lengths {source}", "not a file and a column", "write --lengths data.csv:frames")
    lengths: list[int] = np.ceil(column_lengths(path, column)).astype(int).tolist()
    return lengths
