"""``torch.set_default_tensor_type("torch.cuda.FloatTensor")``: tensors that name no device are made on the card.

``torch.set_default_device`` does that for functions that make tensors, and leaves ``torch.Tensor([1.0])`` on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.patching import replaced

LEGACY_DTYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8, "ShortTensor": torch.int16,
    "IntTensor": torch.int32, "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip


def legacy_constructor(name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """``torch.cuda.FloatTensor(2, 3)``, ``torch.cuda.FloatTensor(x.size())`` or ``torch.cuda.FloatTensor([1, 2])``."""

    def make(*args: Any) -> Tensor:
        if len(args) == 1 and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=dtype, device=NAME)
        if all(isinstance(arg, int) for arg in args):
            return torch.empty(args or (0,), dtype=dtype, device=NAME)
        return torch.as_tensor(args[0], dtype=dtype, device=NAME)

    make.__name__ = f"torch.cuda.{name}"
    return make


@contextlib.contextmanager
def default_tensor_types() -> Iterator[None]:
    """A context in which ``torch.set_default_tensor_type`` takes types of cuda, until the end."""
    with contextlib.ExitStack() as patches:

        def set_default_tensor_type(kind: Any) -> None:
            name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
            dtype = LEGACY_DTYPES[name.rpartition(".")[2]]
            patches.close()
            torch.set_default_device(NAME if "cuda" in name else "cpu")
            torch.set_default_dtype(dtype)
            if "cuda" in name:
                patches.enter_context(replaced(Tensor, __new__=staticmethod(_made_on_card(dtype))))

        with replaced(torch, set_default_tensor_type=set_default_tensor_type):
            yield


def _made_on_card(dtype: torch.dtype) -> Callable[..., Any]:
    """``torch.Tensor(...)`` on the card; that of a subclass is as it was."""
    make, legacy = Tensor.__new__, legacy_constructor("Tensor", dtype)

    def new(cls: type[Tensor], *args: Any, **kwargs: Any) -> Any:
        return legacy(*args) if cls is Tensor and not kwargs else make(cls, *args, **kwargs)

    return new
