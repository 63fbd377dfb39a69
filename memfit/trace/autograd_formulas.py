"""Autograd's formulas, in place where a real run writes in place.

The backward of gather, of indexing, of max, sort or topk along a dimension, and of others spreads a gradient over zeros
that it has just made. A real run writes into them. Where a dispatch mode is entered, or a tensor's class is not
torch's, the formula calls the operator that gives new memory (``areAnyTensorSubclassLike`` in
torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native/TensorAdvancedIndexing.cpp): a trace would show the
gradient twice.

Left as it is traced: the backward of ``linalg.householder_product``, whose formula is another there altogether and
holds less than in a real run. ``prod`` and ``cumprod`` are in ``memfit.trace.products``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from memfit.torch_compat.attributes import sequence_number_of

_aten = torch.ops.aten
ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default})
"""Operators that give zeros."""
IN_PLACE = {
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_copy.default: _aten.index_copy_.default,
    _aten.index_fill.int_Tensor: _aten.index_fill_.int_Tensor,
    _aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
    _aten.put.default: _aten.put_.default,
}
"""Operators that spread values over a tensor, and what writes them into it."""


def note_zeros(node: Any, zeros: Tensor) -> None:
    """Notes the autograd node in whose backward these zeros were made."""
    zeros._memfit_zeros_of = sequence_number_of(node)  # type: ignore[attr-defined]


def writes_into_zeros(node: Any, target: Any) -> bool:
    """Whether a real run writes into this operand of a call of ``IN_PLACE``: zeros that the same formula has made.

    Args:
        node: ``current_autograd_node()``. That of a function written in Python calls what is written there.
    """
    return (
        node is not None
        and not isinstance(node, BackwardCFunction)
        and getattr(target, "_memfit_zeros_of", None) == sequence_number_of(node)
    )
