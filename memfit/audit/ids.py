"""Which samples a batch holds: ids out of indices, cuts, collated data and whatever else samplers and loaders give.

Indices and cuts name their samples. Data names them only where it carries an id; otherwise a sample is known by its
content, which tells samples apart but does not name them.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SURE_NAMES = ("id", "idx", "index", "sample_id", "uid", "utt_id", "key", "__key__")
"""Names of fields that are different for every sample."""
ID_NAMES = (
    "id", "ids", "idx", "idxs", "index", "indices", "indexes", "sample_id", "sample_ids", "uid", "uids", "utt_id",
    "utt_ids", "utt", "utts", "key", "keys", "__key__", "path", "paths", "file", "files", "filename", "filenames",
    "name", "names", "audio_path", "video_path", "wav_path", "image_path",
)  # fmt: skip
"""Names of fields that say which sample it is, the surest first."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one batch."""

    ids: tuple[Hashable, ...]
    lengths: tuple[float, ...] | None = None
    """Length of each sample, where the batch itself says it."""


def batch_of(element: Any, lengths: Any = None) -> Batch:
    """The samples of what a sampler or loader gave, or a loop reported."""
    given = tuple(float(length) for length in lengths) if lengths is not None else None
    cuts = _cuts(element)
    if cuts is not None:
        return Batch(ids=tuple(cut.id for cut in cuts), lengths=given or _durations(cuts))
    return Batch(ids=tuple(_ids(element)), lengths=given)


def sample_of(sample: Any) -> Hashable:
    """The id of one sample of data, before collation."""
    named = named_id(sample)
    return named if named is not None else content_of(sample)


def named_id(sample: Any) -> Hashable | None:
    """The id that a sample carries: itself, its ``id`` attribute or field; None where it carries none."""
    scalar = _scalar(sample)
    if scalar is not None:
        return scalar
    if isinstance(sample, Mapping):
        for name in ID_NAMES:
            if name in sample and _scalar(sample[name]) is not None:
                return _scalar(sample[name])
    if isinstance(sample, (tuple, list)) and len(sample) == 1:
        return _scalar(sample[0])
    return _scalar(getattr(sample, "id", None))


def content_of(sample: Any) -> str:
    """A name made of a sample's content: equal content, equal name."""
    digest = hashlib.blake2b(digest_size=12)
    _feed(sample, digest)
    return f"content {digest.hexdigest()}"


def _ids(element: Any) -> Iterable[Hashable]:
    scalar = _scalar(element)
    if scalar is not None:
        return [scalar]
    if isinstance(element, torch.Tensor):
        element = element.detach().cpu().numpy()
    if isinstance(element, np.ndarray):
        scalar_ids = element.ndim == 1 and element.dtype.kind in "iuUS"
        return element.tolist() if scalar_ids else [content_of(row) for row in element]
    if isinstance(element, Mapping):
        for name in ID_NAMES:
            if name in element and len(ids := list(_ids(element[name]))):
                return ids
        return _rows(list(element.values()))
    if isinstance(element, (list, tuple)):
        return _ids_of_list(element)
    named = named_id(element)
    return [named if named is not None else content_of(element)]


def _ids_of_list(element: list[Any] | tuple[Any, ...]) -> Iterable[Hashable]:
    scalars = [_scalar(item) for item in element]
    if all(scalar is not None for scalar in scalars):
        return scalars
    if all(isinstance(item, list) and all(_scalar(value) is not None for value in item) for item in element):
        return [_scalar(value) for item in element for value in item]
    if all(isinstance(item, tuple) and item and _scalar(item[0]) is not None for item in element):
        return [_scalar(item[0]) for item in element]
    if all(isinstance(item, Mapping) for item in element) and len(element) > 1:
        return [sample_of(item) for item in element]
    if any(isinstance(item, (torch.Tensor, np.ndarray)) and item.ndim for item in element):
        return _rows(list(element))
    if len(element) == 1:
        return _ids(element[0])
    return [sample_of(item) for item in element]


def _rows(fields: list[Any]) -> list[Hashable]:
    """Ids of the rows of collated fields, of which some may lie in mappings: the one field of names, or each row's
    content."""
    sized = [field for field in _leaves(fields) if hasattr(field, "__len__") and getattr(field, "ndim", None) != 0]
    size = max((len(field) for field in sized), default=0)
    columns = [field for field in sized if len(field) == size and not isinstance(field, str)]
    if len(columns) == 1 and len(ids := list(_ids(columns[0]))) == size:
        return ids
    return [content_of([field[row] for field in columns]) for row in range(size)]


def _leaves(fields: Iterable[Any]) -> Iterator[Any]:
    for field in fields:
        if isinstance(field, Mapping):
            yield from _leaves(field.values())
        else:
            yield field


def _cuts(element: Any) -> list[Any] | None:
    """The cuts of a Lhotse-like batch: something iterable that is no list, whose items have an ``id``."""
    if isinstance(element, (str, bytes, Mapping, np.ndarray, torch.Tensor)) or not isinstance(element, Iterable):
        return None
    if isinstance(element, tuple) and element and (first := _cuts(element[0])) is not None:
        return first
    if isinstance(element, (list, tuple)) and not (element and hasattr(element[0], "id")):
        return None
    items = list(element)
    return items if all(hasattr(item, "id") for item in items) else None


def _durations(cuts: list[Any]) -> tuple[float, ...] | None:
    if cuts and all(isinstance(getattr(cut, "duration", None), numbers.Real) for cut in cuts):
        return tuple(float(cut.duration) for cut in cuts)
    return None


def _scalar(value: Any) -> Hashable | None:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_floating_point():
        return int(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu":
        return int(value)
    return None


def _feed(value: Any, digest: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy() if value.dtype is torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "O":
        digest.update(str(value.shape).encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for name in value:
            digest.update(str(name).encode())
            _feed(value[name], digest)
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        for item in value:
            _feed(item, digest)
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, (str, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())
        _feed(vars(value) if hasattr(value, "__dict__") else repr(value), digest)
