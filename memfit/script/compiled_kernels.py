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

from memfit.device.virtual import managed_memory
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


def _noting(get_paged: Callable[..., Tensor], note: Callable[[str], None]) -> Callable[..., Tensor]:
    def noting(*shape: int, **kwargs: Any) -> Tensor:
        note(
            "paged optimizer state is managed memory: it was counted as the host's, and the driver keeps of it on the "
            "card what the rest leaves free"
        )
        return get_paged(*shape, **kwargs)

    return noting


class _Kernels:
    """A compiled extension whose functions change tensors in place and return nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@contextmanager
def compiled_kernels(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which FlexAttention and the extensions that DeepSpeed compiles run without their kernels, and paged
    optimizer state of bitsandbytes is noted.

    Args:
        note: called with each kernel that was replaced.
    """

    def load(builder: Any, verbose: bool = True) -> Any:
        note(f"DeepSpeed's kernels {builder.name!r} were not run: they are assumed to work in place")
        return _Kernels()

    with ExitStack() as stack:

        def flex(module: Any) -> tuple[Any, dict[str, Any]]:
            return module, {"flex_attention": _flex_attention(module.flex_attention, note)}

        def paged(module: Any) -> tuple[Any, dict[str, Any]]:
            known = hasattr(module, "get_paged")
            return module, {"get_paged": _noting(module.get_paged, note)} if known else {}

        if _FLEX in sys.modules:
            owner, attributes = flex(sys.modules[_FLEX])
            stack.enter_context(replaced(owner, **attributes))
        builder = {"deepspeed.ops.op_builder.builder": lambda m: (m.OpBuilder, {"load": load})}
        stack.enter_context(on_import({_FLEX: flex, managed_memory.MODULE: paged, **builder}))
        yield
