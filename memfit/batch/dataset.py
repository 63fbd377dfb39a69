"""A job's data set and the lengths of its samples, checked."""

from __future__ import annotations

import traceback
from collections.abc import Sequence, Set
from typing import Any

from memfit.batch.lengths import as_lengths
from memfit.batch.whole_data_set import whole_data_set
from memfit.errors import InputError, describe, line_of_job
from memfit.geometry import counted_in
from memfit.job import Job


def dataset_of(job: Job) -> Sequence[Any]:
    """The samples by index.

    Raises:
        InputError: ``dataset()`` gave something that cannot be indexed.
    """
    samples = job.dataset()
    if is_stream(samples):
        why = f"gave {type(samples).__name__}, which can only be iterated: memfit run trains on it"
        raise InputError(f"{type(job).__name__}.dataset()", why, "give a sequence of samples here")
    return by_index(job, samples)


def by_index(job: Job, samples: Any) -> Sequence[Any]:
    """What ``dataset()`` gave, checked to be samples by index, all of them on each rank.

    Raises:
        InputError: it has no length, or one that is no number, or cannot be indexed; see ``whole_data_set``.
    """
    if not _is_by_index(samples):
        write = "write dataset(self) -> a sequence of samples with a length, or an IterableDataset"
        raise InputError(f"{type(job).__name__}.dataset()", f"gave {type(samples).__name__}, not a sequence", write)
    count_of(samples, "dataset")
    return whole_data_set(samples, "dataset")


def count_of(samples: Any, name: str) -> int:
    """The number of samples that a data set says it has.

    Args:
        name: of the job's method that gave it.

    Raises:
        InputError: it says something else.
    """
    try:
        return len(samples)
    except (TypeError, ValueError, OverflowError) as error:
        if line_of_job(traceback.walk_tb(error.__traceback__)) is not None:
            raise
        raise InputError(f"len({name}())", describe(error), "write __len__(self) -> the number of samples") from error


def is_stream(samples: Any) -> bool:
    """Whether a data set can only be iterated, as an IterableDataset of torch or of Hugging Face."""
    return hasattr(samples, "__iter__") and not isinstance(samples, Set) and not _is_by_index(samples)


def check_no_loader(job: Job, samples: Any) -> None:
    """Refuses what gives batches in place of samples.

    Raises:
        InputError: it is a DataLoader that makes batches: a window would hold as many batches as it has samples.
    """
    from torch.utils.data import DataLoader

    if isinstance(samples, DataLoader) and samples.batch_sampler is not None:
        why = f"gave {type(samples).__name__}, whose batches would each count as one sample"
        write = "give its data set, such as loader.dataset: memfit shuffles samples, divides and collates them"
        raise InputError(f"{type(job).__name__}.dataset()", why, write)


def _is_by_index(samples: Any) -> bool:
    """Whether a data set has a length and samples by index; torch's own ``Dataset.__getitem__`` only raises."""
    from torch.utils.data import Dataset

    only_raises = getattr(type(samples), "__getitem__", None) is Dataset.__getitem__
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not only_raises


def lengths_of(job: Job) -> list[int] | None:
    """The length of every sample; None where a sample is one unit.

    Raises:
        InputError: ``lengths()`` gave something else than one whole number above 0 for each sample, or nothing although
            the job has a ``longest``: each sample would then count as one unit, and a window have far more of them.
    """
    values = job.lengths()
    if values is None and job.longest is not None and type(job).dataset is not Job.dataset:
        seen = f"{type(job).__name__}.lengths(): None"
        why = f"samples have up to {job.longest} {counted_in(job)}, and each would count as one"
        raise InputError(seen, why, "write lengths(self) -> one whole number above 0 for each sample of dataset()")
    if values is None:
        return None
    try:
        lengths = as_lengths(values)
        if not len(lengths):
            raise InputError("no lengths", "there is nothing to train on", "give one for each sample")
        if (parts := lengths % 1 != 0).any():
            first = int(parts.argmax())
            raise InputError(f"sample {first}", f"its length is {lengths[first]:g}, not a whole number", "round it up")
    except InputError as error:
        seen = f"{type(job).__name__}.lengths(): {error.seen}"
        raise InputError(seen, error.why, "write lengths(self) -> one whole number above 0 for each sample") from error
    return [int(length) for length in lengths]
