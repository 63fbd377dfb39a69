"""Cuts a batch in halves along its samples, whatever nesting it has.

A batch holds its samples as columns (tensors and arrays whose first dimension is the sample, lists with an entry for
each) or as a list of samples that are not stacked, such as images of several sizes. Which of both a list is follows
from what most of the batch's tensors agree with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Leaf = Tensor | np.ndarray


class SampleList(list[Any]):
    """A part of a list of samples: one of its samples alone is no batch of columns."""


class SampleTuple(tuple[Any, ...]):
    """A part of a tuple of samples."""

    __slots__ = ()


def sample_count(batch: Any) -> int:
    """Samples of a batch: the number with which most of its tensors and arrays agree; 1 where there is none."""
    candidates = [*dict.fromkeys(_candidates(batch))]
    return max(candidates, key=lambda count: _agreeing(batch, count), default=1) or 1


def halves(batch: Any) -> list[Any] | None:
    """Two parts of a batch, in order; None where it has one sample, or is of a kind that cannot be cut.

    Tensors and arrays whose first dimension is the number of samples are cut, and lists of that length (file names,
    texts, samples that are not stacked) too. What else is in the batch goes to both parts.
    """
    count = sample_count(batch)
    if count < 2 or not is_nesting(batch):
        return None
    middle = (count + 1) // 2
    unstacked = any(_is_list_of_samples(each, count) for each in _lists(batch))
    return [_part(batch, count, unstacked, rows) for rows in (slice(0, middle), slice(middle, count))]


def is_nesting(batch: Any) -> bool:
    """Whether it is a nesting of tensors and arrays that can be sliced."""
    leaves = [*_leaves(batch)]
    return bool(leaves) and all(_is_cut_by_rows(leaf) for leaf in leaves)


def _part(value: Any, count: int, unstacked: bool, rows: slice) -> Any:
    if isinstance(value, Leaf):
        return value[rows] if _rows(value) == count else value
    if _is_list(value):
        if _is_list_of_samples(value, count) or (unstacked and len(value) == count and _is_uniform(value)):
            return SampleTuple(value[rows]) if isinstance(value, tuple) else SampleList(value[rows])
        if _is_plain(value):
            return value[rows] if len(value) == count else value
        return type(value)(_part(each, count, unstacked, rows) for each in value)
    if isinstance(value, Mapping):
        parts = {key: _part(each, count, unstacked, rows) for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return parts
        made = copy(value)
        made.update(parts)
        return made
    if isinstance(value, tuple) and not isinstance(value, PackedSequence):
        return type(value)(*(_part(each, count, unstacked, rows) for each in value))
    if _is_record(value):
        record = copy(value)
        for name, each in _children_by_field(value):
            object.__setattr__(record, name, _part(each, count, unstacked, rows))
        return record
    return value


def _candidates(value: Any) -> Iterator[int]:
    """Numbers of samples that a batch may have, those of columns first."""
    if _is_list(value) and not _is_plain(value) and _is_uniform(value):
        if isinstance(value, SampleList | SampleTuple):
            yield len(value)
            return
        yield from (count for each in value for count in _candidates(each))
        yield len(value)
    elif (rows := _rows(value)) is not None:
        yield rows
    else:
        yield from (count for each in _children(value) for count in _candidates(each))


def _agreeing(value: Any, count: int) -> int:
    """Parts of a batch that are cut where it has this many samples: tensors, arrays and lists."""
    if isinstance(value, Leaf):
        return int(_rows(value) == count)
    if _is_list(value) and _is_plain(value):
        return int(len(value) == count > 0)
    if _is_list(value) and _is_list_of_samples(value, count):
        return sum(1 for _ in _leaves(value))
    return 0 if isinstance(value, SampleList | SampleTuple) else sum(_agreeing(e, count) for e in _children(value))


def _is_list_of_samples(value: Sequence[Any], count: int) -> bool:
    """Whether a list holds this many samples that are not stacked, and no columns."""
    if len(value) != count or _is_plain(value):
        return False
    if isinstance(value, SampleList | SampleTuple):
        return True
    return _is_uniform(value) and not all(_rows(leaf) == count for leaf in _leaves(value))


def _is_plain(value: Any) -> bool:
    """Whether there is no tensor and no array in it."""
    return next(_leaves(value), None) is None


def _is_uniform(value: Sequence[Any]) -> bool:
    """Whether the entries of a list may be samples of one data set: of one form, in one dimension of several sizes."""
    if isinstance(value, SampleList | SampleTuple):
        return True
    first = _form(value[0])
    return first is not None and all(_same(first, _form(each)) for each in value[1:])


def _form(value: Any) -> Any:
    """Types, ranks and shapes of what an entry holds; None where it holds no tensor."""
    if isinstance(value, Leaf):
        return (str(value.dtype), tuple(value.shape))
    forms = [(name, _form(each)) for name, each in _named_children(value)]
    return (type(value).__name__, forms) if any(form is not None for _, form in forms) else None


def _same(first: Any, second: Any) -> bool:
    if first is None or second is None or first[0] != second[0]:
        return first is second
    if isinstance(first[1], tuple) != isinstance(second[1], tuple) or len(first[1]) != len(second[1]):
        return False
    if isinstance(first[1], tuple):
        return bool(first[1][:1] == second[1][:1] or first[1][1:] == second[1][1:])
    return all(a[0] == b[0] and _same(a[1], b[1]) for a, b in zip(first[1], second[1], strict=True))


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors and arrays of a batch, and packed sequences, which are one thing."""
    if isinstance(value, Leaf | PackedSequence):
        yield value
    for each in _children(value):
        yield from _leaves(each)


def _lists(value: Any) -> Iterator[Sequence[Any]]:
    if _is_list(value):
        yield value
    for each in _children(value):
        yield from _lists(each)


def _children(value: Any) -> Iterator[Any]:
    return (each for _, each in _named_children(value))


def _named_children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
        yield from enumerate(value)
    elif _is_record(value):
        yield from _children_by_field(value)


def _children_by_field(value: Any) -> Iterator[tuple[str, Any]]:
    return ((each.name, getattr(value, each.name)) for each in fields(value) if hasattr(value, each.name))


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | range) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def _is_cut_by_rows(leaf: Any) -> bool:
    """Whether slices of its first dimension can be taken."""
    if isinstance(leaf, Tensor):
        return leaf.layout == torch.strided and not leaf.is_nested
    return isinstance(leaf, np.ndarray)


def _rows(leaf: Any) -> int | None:
    """The first dimension."""
    if not _is_cut_by_rows(leaf) or leaf.ndim == 0:
        return None
    return int(leaf.shape[0])
