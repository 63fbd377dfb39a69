"""``prod`` and ``cumprod`` in a trace, with the backward that a real run takes where no factor is zero.

torch's formulas (torch/csrc/autograd/FunctionsManual.cpp, aten/src/ATen/native/ReduceOps.cpp) ask whether a factor is
zero, and do not ask it of tensors of other classes than torch's own, nor while a dispatch mode is active: a trace would
show the formula for zeros, which holds more. Of a real tensor, as a script on the virtual CPU has, the trace asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from memfit.device.virtual.patching import replaced
from memfit.torch_compat import DisableTorchDispatch, FakeTensor
from memfit.torch_compat.attributes import are_transforms_active

Call = Callable[..., Tensor]


class _Prod(torch.autograd.Function):
    """A product of all elements, or of those along a dimension."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, call: Call, place: tuple[int, bool] | None) -> Tensor:
        out = call(factors)
        ctx.place = place
        ctx.save_for_backward(factors, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        factors, out = ctx.saved_tensors
        factors = factors.to(grad.dtype)
        if factors.dim() == 0:
            return grad, None, None
        if ctx.place is None:
            factors == 0  # noqa: B015  (where the zeros are: none)
            return grad * (out / factors).conj(), None, None
        dim, keepdim = ctx.place
        if not keepdim:
            grad, out = grad.unsqueeze(dim), out.unsqueeze(dim)
        is_zero = factors == 0
        zeros = is_zero.sum(dim, True)
        zeros.sum()
        product = grad * (out / factors).conj()
        del zeros, is_zero
        return product, None, None


class _Cumprod(torch.autograd.Function):
    """Products of the elements up to each, along a dimension."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, call: Call, dim: int) -> Tensor:
        out = call(factors)
        ctx.dim = dim
        ctx.save_for_backward(factors, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        factors, out = ctx.saved_tensors
        grad = grad.to(factors.dtype)
        if factors.numel() <= 1 or factors.shape[ctx.dim] == 1:
            return grad, None, None
        weighted = out.conj() * grad
        is_zero = factors == 0
        is_zero.any()
        flipped = weighted.flip(ctx.dim)
        summed = flipped.cumsum(ctx.dim)
        sums = summed.flip(ctx.dim)
        del flipped, summed  # as temporaries of one C++ expression, they go together
        return sums.div(factors.conj()), None, None


def _has_formula_for_zeros(factors: Any) -> bool:
    """Whether autograd alone differentiates, and would take the formula for zeros, though no factor is known to be."""
    is_real = type(factors) in (Tensor, nn.Parameter)
    return (
        (is_real or isinstance(factors, FakeTensor))
        and factors.requires_grad
        and torch.is_grad_enabled()
        and not are_transforms_active()
        and forward_ad.unpack_dual(factors).tangent is None
        and not (is_real and _has_zero(factors))
    )


def _has_zero(factors: Tensor) -> bool:
    """Whether a factor of a real tensor is zero."""
    with DisableTorchDispatch():
        return not bool(factors.detach().all())


def _prod(original: Callable[..., Any]) -> Callable[..., Any]:
    def prod(self: Any, *args: Any, **kwargs: Any) -> Any:
        dim = args[0] if args else kwargs.get("dim")
        if "out" in kwargs or not (dim is None or type(dim) is int) or not _has_formula_for_zeros(self):
            return original(self, *args, **kwargs)
        place = None if dim is None else (dim, bool(args[1] if len(args) > 1 else kwargs.get("keepdim")))
        return _Prod.apply(self, lambda factors: original(factors, *args, **kwargs), place)

    return prod


def _cumprod(original: Callable[..., Any]) -> Callable[..., Any]:
    def cumprod(self: Any, *args: Any, **kwargs: Any) -> Any:
        dim = args[0] if args else kwargs.get("dim")
        if "out" in kwargs or type(dim) is not int or not _has_formula_for_zeros(self):
            return original(self, *args, **kwargs)
        return _Cumprod.apply(self, lambda factors: original(factors, *args, **kwargs), dim)

    return cumprod


@contextmanager
def products_without_zeros() -> Iterator[None]:
    """A context in which ``prod`` and ``cumprod`` of fake tensors have the backward of factors that are not zero."""
    with (
        replaced(torch, prod=_prod(torch.prod), cumprod=_cumprod(torch.cumprod)),
        replaced(Tensor, prod=_prod(Tensor.prod), cumprod=_cumprod(Tensor.cumprod)),
    ):
        yield
