"""Keys of calls: what the shapes of an operator's outputs depend on, to remember operators that ran before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.tensor_classes import FAKE_CLASSES
from memfit.torch_compat import FakeTensor
from memfit.torch_compat.attributes import is_zero_tensor

_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)  # fmt: skip
lazy_operators: set[Any] = set()
"""Operators that gave a tensor with a bit for what is computed later: conjugated, negated, all zeros. Mostly none, and
then no argument is asked for its bits."""


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor has a bit that its shape does not tell."""
    return tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor)


class _NotPlainError(Exception):
    """An argument that the memory does not deal with."""


def _describe(args: Any, parts: list[Any], tensors: list[FakeTensor]) -> None:
    """Appends what the outputs' shapes depend on to ``parts``, and the fake tensors to ``tensors``."""
    for arg in args:
        kind = type(arg)
        if kind in FAKE_CLASSES:
            if arg.constant is not None or arg.layout is not torch.strided:
                raise _NotPlainError
            if lazy_operators and is_lazy(arg):
                raise _NotPlainError
            parts += arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device
            tensors.append(arg)
        elif kind in _PLAIN:
            parts += kind, arg
        elif kind is list or kind is tuple:
            parts.append(len(arg))
            _describe(arg, parts, tensors)
        else:
            raise _NotPlainError


def call_key(func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> tuple[Any, ...] | None:
    """What a call's outputs depend on; None where there is more. Its tensors are appended to ``tensors``."""
    parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    try:
        _describe(args, parts, tensors)
        for name, value in kwargs.items():
            parts.append(name)
            _describe((value,), parts, tensors)
    except _NotPlainError:
        return None
    return tuple(parts)
