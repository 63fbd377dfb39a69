"""Real tensors of the virtual CPU whose content is no longer known: something unknown was written to them.

A buffer that is no parameter is real. Once a script writes into it what a net gives (``ema.copy_(density)``), its
numbers stand for nothing, nor do those that are computed of them. What is noted here is noted by storage, and so of
all views.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import FakeTensor
from memfit.torch_compat.attributes import schema_of, storage_id_of, stored_parts

_aten = torch.ops.aten
_OVERWRITES = frozenset(
    {
        _aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.normal_.default,
        _aten.uniform_.default, _aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from"),
        _aten.exponential_.default, _aten.bernoulli_.float,
    }
)  # fmt: skip
"""Operators after which nothing of the tensor's former content is left."""
_RUNNING_STATISTICS = {_aten.native_batch_norm.default: slice(3, 5), _aten.cudnn_batch_norm.default: slice(3, 5)}
"""Operators that write to arguments of which their schema does not say so."""

_storages: set[int] = set()


def is_unknown(tensor: Tensor) -> bool:
    """Whether the content of a real tensor is no longer known."""
    return bool(_storages) and any(storage_id_of(part) in _storages for part in stored_parts(tensor))


def any_unknown(values: Any) -> bool:
    """Whether the content of a real tensor among these arguments, or in a list among them, is no longer known."""
    return bool(_storages) and any(is_unknown(tensor) for tensor in _real_tensors(values))


def note_unknown(tensor: Tensor) -> None:
    """Notes that the content of a real tensor is no longer known."""
    for part in stored_parts(tensor):
        key = storage_id_of(part)
        if key not in _storages:
            _storages.add(key)
            weakref.finalize(part.untyped_storage(), _storages.discard, key)


def note_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Notes the real tensors that an operator writes something unknown to."""
    for tensor in _real_tensors(_written_by(func, args, kwargs)):
        note_unknown(tensor)


def follow_unknown(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    """Notes what an operator on real tensors gives or writes as unknown where an argument of it is; a tensor that is
    overwritten as a whole by what is known is known again."""
    if func in _OVERWRITES and not any_unknown(args[1:]):
        target = args[0]
        if target.numel() * target.itemsize == target.untyped_storage().nbytes():
            _storages.discard(storage_id_of(target))
        return
    if _is_made_anew(func) or not (any_unknown(args) or any_unknown(kwargs.values())):
        return
    note_writes(func, args, kwargs)
    for tensor in _real_tensors((out,)):
        note_unknown(tensor)


def _real_tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) and value.device.type == "cpu":
                yield value
        elif isinstance(value, list | tuple):
            yield from _real_tensors(value)


@cache
def _is_made_anew(func: Any) -> bool:
    """Whether an operator takes a tensor's shape and type alone (``zeros_like``, ``new_zeros``)."""
    name = schema_of(func).name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that an operator writes to."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple((at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    written = [args[at] if at < len(args) else kwargs.get(name) for at, name in _writes(func)]
    if func in _RUNNING_STATISTICS and args[5]:
        written += args[_RUNNING_STATISTICS[func]]
    return written
