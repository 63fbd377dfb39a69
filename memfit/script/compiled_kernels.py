"""Kernels that a library compiles for the card at run time: those of FlexAttention and of DeepSpeed's optimizers.

A trace cannot compile them. It replaces kernels whose memory is known from their documented interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memfit.device.virtual.patching import replaced
from memfit.script.import_hooks import on_import

_FLEX = "torch.nn.attention.flex_attention"


class _FusedFlexAttention(torch.autograd.Function):
    """What the compiled kernel allocates: the output and a float32 log-sum-exp for each query; in the backward, the row
    sums of output times gradient, and the three gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return grads


def _flex_attention(original: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    def flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.device.type not in ("cuda", "vgpu"):
            return original(query, key, value, *args, **kwargs)
        note("FlexAttention was traced as its compiled kernel, without gradients of what score_mod captures")
        out, lse = _FusedFlexAttention.apply(query, key, value)
        return (out, lse) if kwargs.get("return_lse") else out

    return flex_attention


class _Kernels:
    """A compiled extension whose functions change tensors in place and return nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@contextmanager
def compiled_kernels(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which FlexAttention and the extensions that DeepSpeed compiles run without their kernels.

    Args:
        note: called with each kernel that was replaced.
    """

    def load(builder: Any, verbose: bool = True) -> Any:
        note(f"DeepSpeed's kernels {builder.name!r} were not run: they are assumed to work in place")
        return _Kernels()

    with ExitStack() as stack:

        def flex(module: Any) -> tuple[Any, dict[str, Any]]:
            return module, {"flex_attention": _flex_attention(module.flex_attention, note)}

        if _FLEX in sys.modules:
            owner, attributes = flex(sys.modules[_FLEX])
            stack.enter_context(replaced(owner, **attributes))
        stack.enter_context(
            on_import({_FLEX: flex, "deepspeed.ops.op_builder.builder": lambda m: (m.OpBuilder, {"load": load})})
        )
        yield
