"""Matrix products whose terms are summed in parts, as tensor-parallel ranks sum them."""

from __future__ import annotations

from typing import Any

import torch

from memfit.torch_compat import TorchDispatchMode

_FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Operators of torch that linear layers and their gradients become, and where their two factors are."""


class SplitProducts(TorchDispatchMode):
    """A context in which every matrix product is a sum of ``pieces`` products, each over a random share of the terms.

    A rank of ``pieces`` that hold parts of a layer sums its own terms, rounds to the tensor's type, and the ranks add
    up what they have. A rowwise layer does so in its forward, a colwise one for the gradient of its input. Which terms
    are summed together is drawn anew for each product.

    Args:
        pieces: at least 1; a product of fewer terms is split into as many as it has.
        seed: of the draws, which leave torch's own generators alone.
    """

    def __init__(self, pieces: int, seed: int) -> None:
        super().__init__()
        self._pieces, self._generator = pieces, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        left, right = _FACTORS.get(func.overloadpacket.__name__, (0, 0))
        if not right or func.namespace != "aten" or args[left].shape[-1] < 2:
            return func(*args, **kwargs)
        terms = torch.randperm(args[left].shape[-1], generator=self._generator)
        first, *others = terms.to(args[left].device).chunk(self._pieces)
        factors = list(args)
        factors[left], factors[right] = args[left].index_select(-1, first), args[right].index_select(-2, first)
        total = func(*factors, **kwargs)
        scale = kwargs.get("alpha", 1)
        for share in others:
            part = torch.matmul(args[left].index_select(-1, share), args[right].index_select(-2, share))
            total = total + (part if scale == 1 else part * scale)
        return total
