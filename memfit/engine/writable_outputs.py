"""Outputs of cut layers that the net may change in place, as it may those of a layer on one device.

``DTensor.to_local`` gives a view, of which autograd forbids that: an activation with ``inplace=True`` and a residual
sum with ``+=`` would raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class _Writable(torch.autograd.Function):
    """Gives a tensor back, on the same memory, as one that is no view for autograd."""

    keeps_parts = True
    """The output is a part of a tensor where the input is (``gives_parts``)."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0]


def writable(output: Any) -> Any:
    """The output of a layer, which may be changed in place where it is a plain tensor with a gradient."""
    plain = isinstance(output, Tensor) and not isinstance(output, DTensor)
    return _Writable.apply(output) if plain and output.requires_grad else output


def make_writable(module: nn.Module) -> None:
    """The outputs of a module may be changed in place; called after all other hooks are there."""
    module.register_forward_hook(lambda module, args, output: writable(output))
