"""Softmax as torch had it up to 1.10, as far as memory sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SOFTMAX = frozenset(
    {
        torch.softmax, Tensor.softmax, functional.softmax,
        torch.log_softmax, Tensor.log_softmax, functional.log_softmax,
    }
)  # fmt: skip


class KeepsInputs(TorchFunctionMode):
    """Context in which softmax and log_softmax keep their input until their backward has run.

    Up to torch 1.10 the derivative asked for it, and used its type alone (pytorch/pytorch, pull request 66018, of
    October 2021; tools/autograd/derivatives.yaml). Attention in half precision keeps its scores by that, too.
    Left out: the log_softmax within a loss of torch, whose input is the net's output.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _SOFTMAX and out.grad_fn is not None:
            held = [args[0] if args else (kwargs or {})["input"]]
            out.grad_fn.register_hook(lambda *gradients: held.clear())
        return out
