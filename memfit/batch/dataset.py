"""A job's data set and the lengths of its samples, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.batch.lengths import as_lengths
from memfit.errors import InputError
from memfit.job import Job


def dataset_of(job: Job) -> Sequence[Any]:
    """The samples by index.

    Raises:
        InputError: ``dataset()`` gave something that has no length, or cannot be indexed.
    """
    samples = job.dataset()
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        write = "write dataset(self) -> a sequence of samples, with a length"
        raise InputError(f"{type(job).__name__}.dataset()", f"gave {type(samples).__name__}, not a sequence", write)
    return samples


def lengths_of(job: Job) -> list[int] | None:
    """The length of every sample; None where a sample is one unit.

    Raises:
        InputError: ``lengths()`` gave something else than one positive number for each sample.
    """
    lengths = job.lengths()
    try:
        return None if lengths is None else as_lengths(lengths).tolist()
    except InputError as error:
        seen = f"{type(job).__name__}.lengths(): {error.seen}"
        raise InputError(seen, error.why, "write lengths(self) -> one number above 0 for each sample") from error
