"""Gradients of DTensor parameters that a forward read as plain tensors: no two of them in the same memory.

Autograd gives a parameter a gradient as it is where nothing else holds the tensor, and copies it where something does.
A gradient on its way to a DTensor parameter is wrapped first, and nothing else holds the wrapper: two parameters whose
sum is one output, or of which one is beside the other, as a vision transformer's class token and positions of one
sample, would get gradients in the same memory. What adds to both of them, or scales both, would do it twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.torch_compat.attributes import storage_id

_given: dict[int, StorageWeakRef] = {}
"""Memory that gradients were given in, by the identity of its storage, which is not used again while it is here."""
_MOST = 1024
"""Entries at which those whose memory was freed are dropped."""


def with_own_gradient(tensor: Tensor) -> Tensor:
    """A view of a tensor; its gradient is in memory that no other gradient was given in."""
    result: Tensor = _OwnGradient.apply(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor
    return result


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Tensor:
        gradient: Tensor = gradients[0]
        if _is_given(gradient):
            gradient = gradient.clone()
            _is_given(gradient)
        return gradient


def _is_given(gradient: Tensor) -> bool:
    """Whether a gradient was given in this memory before; from now on, one was."""
    storage = gradient.untyped_storage()
    before = _given.get(storage_id(storage))
    if before is not None and not before.expired():
        return True
    if len(_given) >= _MOST:
        for key in [key for key, reference in _given.items() if reference.expired()]:
            del _given[key]
    _given[storage_id(storage)] = StorageWeakRef(storage)
    return False
