"""Parameters and buffers of nn.LazyLinear and similar modules, which have no shape until the first forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from memfit.device.virtual.patching import replaced
from memfit.torch_compat import DisableTorchFunction

_MODEL = "_memfit_model"
"""Attribute of an uninitialised tensor that was moved: an empty tensor with its present device and type."""
_MOVES = frozenset({Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.half, Tensor.float, Tensor.double})


@contextmanager
def lazy_parameters() -> Iterator[None]:
    """Context in which an uninitialised tensor that is moved remembers its device, and ``materialize`` makes it there.
    A real tensor cannot take the content of one on the card in place.
    """
    ask = vars(UninitializedTensorMixin)["__torch_function__"].__func__

    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _MOVES:
            return ask(cls, func, types, args, kwargs)
        tensor = args[0]
        vars(tensor)[_MODEL] = func(_model(tensor), *args[1:], **(kwargs or {}))
        return tensor

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        model = _model(self)
        made: Tensor = torch.empty(shape, device=device or model.device, dtype=dtype or model.dtype)
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        torch.utils.swap_tensors(self, made)

    with replaced(UninitializedTensorMixin, __torch_function__=classmethod(torch_function), materialize=materialize):
        yield


def _model(tensor: Any) -> Tensor:
    model: Tensor | None = vars(tensor).get(_MODEL)
    if model is None:
        with DisableTorchFunction():
            model = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return model
