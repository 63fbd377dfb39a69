"""The bias of a linear layer, added in place where a real run adds it in place.

Where the input of a linear layer has three dimensions and is not contiguous (transposed, say), or more than three,
torch multiplies first and then adds the bias into the product. Where a dispatch mode is entered, or the bias's class is
not torch's, the sum is a new tensor (``isTensorSubclassLike`` in aten/src/ATen/native/Linear.cpp): a trace would show
the layer's output twice. The same holds within recurrent layers that are computed from linear ones, such as an LSTM
with projections.

A product and a sum are of one linear layer if the same call of a frame of Python has made both: ``x @ w + b`` has made
them by two. Where that call went through somebody else's dispatch mode or tensor class, a real run makes a new tensor
too.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat.attributes import storage_id_of

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.mv.default})
_SUM = _aten.add.Tensor
_DISPATCH = "__torch_dispatch__"

_Place = list[CodeType | int]
"""Code and the place in it, of each frame."""


class LinearSums:
    """The last product of a forward, and where it was made."""

    def __init__(self) -> None:
        self._storage = 0
        self._place: _Place | None = None

    def note(self, func: Any, out: Any, frame: FrameType) -> None:
        """Notes a call's result, where it is a product.

        Args:
            frame: that of the tracer's ``__torch_dispatch__``.
        """
        if func in _PRODUCTS:
            self._storage, self._place = storage_id_of(out), _place_of(frame)

    def is_in_place(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> bool:
        """Whether a real run writes this call's result into its first operand; arguments as of ``note``."""
        if func is not _SUM or self._place is None or kwargs:
            return False
        product, bias = args[0], args[1]
        if not (isinstance(product, Tensor) and isinstance(bias, Tensor)):
            return False
        fits = bias.dim() == 1 and product.dim() not in (0, 2) and bias.shape[0] == product.shape[-1]
        if not fits or product.dtype != bias.dtype or storage_id_of(product) != self._storage:
            return False
        place, self._place = self._place, None
        return place == _place_of(frame)


def added_in_place(product: Tensor, bias: Tensor) -> Tensor:
    """The sum in the product's own memory, as a tensor of its own: autograd gives it another history."""
    out: Tensor = _aten.alias.default(product.add_(bias))
    return out


def _place_of(frame: FrameType) -> _Place | None:
    """The calls that frames of Python have open around the tracer; None where another dispatch is among them."""
    place: list[CodeType | int] = []
    caller = frame.f_back
    while caller is not None:
        code = caller.f_code
        if code.co_name == _DISPATCH:
            return None
        place += code, caller.f_lasti
        caller = caller.f_back
    return place


PRODUCTS_AND_SUMS = _PRODUCTS | {_SUM}
"""Operators of which this module is asked."""
