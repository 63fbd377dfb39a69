"""Python numbers that autograd on a CPU saves as 8-byte tensors, for the backward of a product or a quotient.

No operator makes them. Each goes when that backward has run, or with the graph, whichever is first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat import sequence_number, top_saved_tensors_hooks
from memfit.torch_compat.attributes import sequence_number_of, view_base

NBYTES = 8
_SAVES_NUMBERS = {
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten.div_.Tensor,
}


class _Life:
    """Put among an autograd node's metadata, it lives as long as the node."""


class SavedNumbers:
    """Follows them through a trace.

    Args:
        allocate: told of a new number; gives its storage.
        free: told of a storage that is gone.
    """

    def __init__(self, allocate: Callable[[], int], free: Callable[[int], None]) -> None:
        self._allocate, self._free = allocate, free
        self._alive: dict[int, int] = {}
        """Storages by the sequence number of the node that keeps them."""
        self._running = -1
        self._made: tuple[int, weakref.ref[Tensor]] | None = None

    def before(self, func: Any, args: Any, node: Any) -> int | None:
        """A call begins, in the backward of ``node`` or of none.

        Gives the sequence number of the node that keeps a number, if this call makes one.
        """
        if self._made is not None:
            self._follow(*self._made)
            self._made = None
        if node is not None and sequence_number_of(node) != self._running:
            self._forget(self._running)
            self._running = sequence_number_of(node)
        if not (func in _SAVES_NUMBERS and len(args) == 2 and not isinstance(args[1], Tensor)):
            return None
        kept = args[0].requires_grad and torch.is_grad_enabled()
        if not kept or top_saved_tensors_hooks(True) is not None:
            return None
        keeper = sequence_number() - 1
        self._alive[keeper] = self._allocate()
        return keeper

    def after(self, keeper: int, product: Tensor) -> None:
        """The call has made this product, whose node is not there yet."""
        self._made = keeper, weakref.ref(product)

    def _follow(self, keeper: int, made: weakref.ref[Tensor]) -> None:
        """Ties a number to the node of the product that was made: where that is gone, so is the number.

        Of a product in place on a view, the node is its base's. The view's own may be under way: autograd makes it by
        the operator that runs now, and asking for it would wait for itself.
        """
        product = made()
        base = None if product is None else view_base(product)
        node = getattr(product if base is None else base, "grad_fn", None)
        if node is None:
            self._forget(keeper)
            return
        life = _Life()
        node.metadata[_Life] = life
        weakref.finalize(life, self._forget, keeper).atexit = False

    def _forget(self, keeper: int) -> None:
        storage = self._alive.pop(keeper, None)
        if storage is not None:
            self._free(storage)
