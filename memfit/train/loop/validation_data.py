"""ValidationData: the real samples that a run validates on. Without any, a run does not validate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.apply.batches import validation_on_device
from memfit.apply.job_objects import JobCall
from memfit.apply.train_state import TrainState
from memfit.batch.dataset import count_of
from memfit.batch.whole_data_set import whole_data_set
from memfit.errors import InputError, describe
from memfit.job import Job, Shape
from memfit.trace.step_phases import fetch_synthetic


@dataclass(frozen=True, kw_only=True)
class ValidationData:
    """Where a job's validation batches come from.

    With ``samples``, every one of them is in one batch. Otherwise the job's ``validation_batch`` gives a real batch.
    """

    samples: Sequence[Any] | None

    def batches(self, train_state: TrainState, shape: Shape, *, briefly: bool = False) -> Iterator[tuple[Fetch, int]]:
        """(what fetches a batch onto the device, its items) for each batch of at most ``shape.items``.

        Args:
            briefly: the first batch alone, which is the largest.
        """
        job, device = train_state.job, train_state.device
        if self.samples is None:
            yield lambda: fetch_synthetic(job, shape, device, validation=True), shape.items
            return
        count = min(shape.items, len(self.samples)) if briefly else len(self.samples)
        for begin in range(0, count, shape.items):
            numbers = range(begin, min(begin + shape.items, count))
            yield _fetch(job, self.samples, numbers, device), len(numbers)

    def largest(self, shape: Shape) -> Shape:
        """The shape of the largest batch, which is ``shape`` or has fewer items."""
        return shape if self.samples is None else replace(shape, items=min(shape.items, len(self.samples)))

    def __str__(self) -> str:
        return "validation_batch()" if self.samples is None else f"{len(self.samples)} samples of validation_dataset()"


Fetch = Callable[[], Any]


def _fetch(job: Job, samples: Sequence[Any], numbers: range, device: torch.device) -> Fetch:
    def sample(position: int) -> Any:
        write = "write validation_dataset(self) -> samples by index, from 0 to one less than their number"
        with JobCall(f"validation_dataset()[{position}]", write):
            return samples[position]

    return lambda: validation_on_device(job, job.validation_collate([sample(i) for i in numbers]), device)


def validation_data(job: Job) -> ValidationData | None:
    """What a job validates on; None where it has no validation, or nothing but made-up batches.

    Raises:
        InputError: ``validation_dataset`` gave no sequence, or an empty one; see ``whole_data_set``.
    """
    if not job.validates:
        return None
    samples = job.validation_dataset()
    if samples is None:
        return ValidationData(samples=None) if job.real_validation_batch else None
    has_samples = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if not has_samples or count_of(samples, "validation_dataset") == 0:
        gave = "no sample" if hasattr(samples, "__len__") else f"{type(samples).__name__}, not a sequence"
        write = "write validation_dataset(self) -> a sequence of samples, or leave it out"
        raise InputError(f"{type(job).__name__}.validation_dataset()", f"gave {gave}", write)
    return ValidationData(samples=whole_data_set(samples, "validation_dataset"))


def no_real_samples(job: Job) -> str:
    """What to write in a job that has a validation and no real samples for it."""
    return (
        f"{type(job).__name__} has validate() and no real samples for it: write validation_dataset(self) -> samples, "
        "or real_validation_batch = True where validation_batch() gives real ones"
    )


def metrics_of(job: Job, values: Mapping[Any, Any], *, lists: bool = False) -> dict[str, Any]:
    """What ``validate`` gave, as numbers by name.

    Args:
        lists: tensors, arrays and lists of several numbers are allowed too, and become nested lists.

    Raises:
        InputError: a value is no number.
    """
    metrics = {}
    for name, value in values.items():
        try:
            metrics[str(name)] = _numbers(value, lists)
        except (TypeError, ValueError, OverflowError) as error:
            write = "write validate(self, nets, batch) -> {'name': number}"
            raise InputError(f"{type(job).__name__}.validate(): {name!r}", describe(error), write) from error
    return metrics


def _numbers(value: Any, lists: bool) -> Any:
    if lists and hasattr(value, "tolist"):
        value = value.tolist()
    if lists and isinstance(value, list):
        return [_numbers(part, lists) for part in value]
    if isinstance(value, str | bytes):
        raise TypeError(f"it is a {type(value).__name__}, not a number")
    return float(value)


def mean_of(parts: Sequence[tuple[Any, int]]) -> Any:
    """The mean of the metrics of several batches, each weighted by its items.

    Numbers by name, or lists of numbers of one length; None where one of them is None or lengths differ.
    """
    values = [value for value, _ in parts]
    if all(isinstance(value, dict) for value in values):
        names = [name for name in values[0] if all(name in value for value in values)]
        return {name: mean_of([(value[name], items) for value, items in parts]) for name in names}
    if all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
        return [mean_of([(value[i], items) for value, items in parts]) for i in range(len(values[0]))]
    if not all(isinstance(value, int | float) for value in values):
        return None
    return sum(value * items for value, items in parts) / sum(items for _, items in parts)
