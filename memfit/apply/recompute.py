"""Recompute: what of a module's forward is kept for its backward. Put onto instances, and taken off again.

keep: everything that autograd saves. selective: the outputs of matmuls, convolutions and attention; the rest is
computed again. full: the module's inputs alone. offload: everything, but moved to the host until the backward.

Recomputing is torch.utils.checkpoint without reentry, which restores the random state: dropout comes out the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memfit.blocks import find_module
from memfit.errors import InputError
from memfit.job import Nets
from memfit.plan import MODES

_aten = torch.ops.aten
COSTLY = frozenset(
    {
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)  # fmt: skip
"""The operators whose outputs ``selective`` keeps."""


@contextmanager
def recompute(nets: Nets, modes: Mapping[str, str]) -> Iterator[None]:
    """Inside, the modules at these paths keep, recompute or offload as their mode says.

    Raises:
        InputError: an unknown mode or module.
    """
    for path, mode in modes.items():
        if mode not in MODES:
            raise InputError(f"checkpointing {path} = {mode!r}", "no such mode", f"write one of {', '.join(MODES)}")
    modules = {path: find_module(nets, path) for path, mode in modes.items() if mode != "keep"}
    before: dict[str, Any] = {path: module.__dict__.get("forward") for path, module in modules.items()}
    try:
        for path, module in modules.items():
            module.forward = _wrapped(module, modes[path])
        yield
    finally:
        for path, module in modules.items():
            if before[path] is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before[path]


def _wrapped(module: nn.Module, mode: str) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if mode == "offload":
            with torch.autograd.graph.save_on_cpu():
                return forward(*args, **kwargs)
        if mode == "selective":
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return kept


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
