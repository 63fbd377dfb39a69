"""Cuts a batch in halves along its samples, whatever nesting it has."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from memfit.apply.train_state import map_tensors, tensors_in


def sample_count(batch: Any) -> int:
    """Samples of a batch: the first dimension that most of its tensors have; 1 where there is none."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0)
    return max(sizes, key=lambda size: (sizes[size], size)) if sizes else 1


def halves(batch: Any) -> list[Any] | None:
    """Two parts of a batch, in order; None where it has one sample.

    Tensors whose first dimension is the number of samples are cut, and lists of that length (file names, texts) too.
    What else is in the batch goes to both parts.
    """
    count = sample_count(batch)
    if count < 2:
        return None
    middle = (count + 1) // 2
    return [_part(batch, count, slice(0, middle)), _part(batch, count, slice(middle, count))]


def _part(batch: Any, count: int, rows: slice) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() > 0 and tensor.shape[0] == count else tensor

    if isinstance(batch, list | tuple) and len(batch) == count and not any(isinstance(x, Tensor) for x in batch):
        return type(batch)(batch[rows])
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(_part(value, count, rows) for value in batch)
    if type(batch) is dict:
        return {key: _part(value, count, rows) for key, value in batch.items()}
    return map_tensors(batch, cut, lambda value: _plain_part(value, count, rows))


def _plain_part(value: Any, count: int, rows: slice) -> Any:
    return value[rows] if isinstance(value, list) and len(value) == count else value
