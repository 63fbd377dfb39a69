"""FlexAttention on the virtual card: what its compiled kernel allocates, in place of the kernel.

torch's function itself is changed, and not its name in torch's module: a job's file has imported it before the trace.

Selective checkpointing sees the kernel as torch's operator ``flex_attention``: a policy that keeps that operator's
outputs keeps those of the kernel, and the recomputation reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memfit.device.virtual.patching import replaced
from memfit.torch_compat import current_dispatch_mode
from memfit.torch_compat.selective_checkpoint import (
    FLEX_DEVICE_CHECK,
    CachedOutputs,
    CachingOutputs,
    dispatch_mode_popped,
    flex_operator,
)

_INSTEAD = "_memfit_flex_attention"
"""The name in torch's module of what is called in place of ``flex_attention``."""
NOTE = (
    "FlexAttention was traced as its compiled kernel, without gradients of what score_mod captures; a run that does "
    "not compile it needs more: it keeps all scores"
)


def _allocate(operator: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's outputs: (batch, heads, queries, width of values), and a float32 log-sum-exp for each query."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's outputs; inside selective checkpointing, those that it kept, where it kept them."""
    mode = current_dispatch_mode()
    if not isinstance(mode, CachingOutputs | CachedOutputs):
        return _allocate(flex_operator, query, key, value)
    with replaced(type(flex_operator), __call__=_allocate), dispatch_mode_popped():
        outputs: tuple[Tensor, Tensor] = mode.__torch_dispatch__(flex_operator, (), (query, key, value))
    return outputs


class _FusedFlexAttention(torch.autograd.Function):
    """What the compiled kernel allocates: the output and a float32 log-sum-exp for each query; in the backward, the row
    sums of output times gradient, and the three gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _outputs(query, key, value)
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


@contextmanager
def flex_attention_kernels(note: Callable[[str], None]) -> Iterator[None]:
    """A context in which ``flex_attention`` takes tensors of the virtual card, whoever imported it before.

    Args:
        note: called with a line on what is not computed.
    """
    from torch.nn.attention import flex_attention as module

    function: Any = module.flex_attention
    code, closure = function.__code__, function.__closure__
    original: Any = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    original.__kwdefaults__ = function.__kwdefaults__
    check = getattr(module, FLEX_DEVICE_CHECK, lambda *tensors: None)

    def checked(query: Tensor, *others: Tensor) -> None:
        if query.device.type != "vgpu":
            check(query, *others)

    instead = {_INSTEAD: _kernel_instead(original, note), FLEX_DEVICE_CHECK: checked}
    with replaced(module, **instead), _with_code(function, _call_instead.__code__):
        yield


def _call_instead(*args: Any, **kwargs: Any) -> Any:
    """Its code runs with the names of torch's module."""
    return _memfit_flex_attention(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def _with_code(function: Any, code: CodeType) -> Iterator[None]:
    """A context in which a function runs this code, which takes any arguments, and has no defaults."""
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, None, None
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before


def _kernel_instead(original: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    """``flex_attention`` of torch, which on the card allocates what its kernel allocates. Inside of compiled code it is
    torch's own: ``memfit.device.virtual.flex_kernels`` replaces its operator in the graph.

    Args:
        note: called with a line on what is not computed.
    """

    signature = inspect.signature(original)

    def flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or query.device.type not in ("cuda", "vgpu"):
            return original(query, key, value, *args, **kwargs)
        note(NOTE)
        out, lse = _FusedFlexAttention.apply(query, key, value)
        given = signature.bind(query, key, value, *args, **kwargs).arguments
        asked = given.get("return_aux")
        if asked is None:
            return (out, lse) if given.get("return_lse") else out
        from torch.nn.attention.flex_attention import AuxOutput

        largest = torch.empty_like(lse) if asked.max_scores else None
        return out, AuxOutput(lse=lse if asked.lse else None, max_scores=largest)

    return flex_attention
