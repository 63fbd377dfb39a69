"""Recomputation: which tensors of a module's forward are kept for its backward. Can be applied and removed.

keep: everything that autograd saves. selective: the outputs of matmuls, convolutions and attention; the rest is
recomputed. full: only the module's inputs. offload: nothing stays on the device; saved tensors wait on the host, copied
on the stream that computes (``memfit.apply.offload``).

Recomputation is torch.utils.checkpoint without reentry, which restores the random state, so dropout draws the same
mask; the state that the module had in its first forward is restored too (``memfit.apply.checkpointed_forward``). In a
net given to torch.compile, such a module runs uncompiled: the backward would rerun the uncompiled code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.apply.checkpointed_forward import ForwardState
from memfit.apply.offload import saved_tensors_on_host
from memfit.apply.selective_checkpoint import selective_contexts
from memfit.blocks import find_module
from memfit.engine.absent_module import AbsentModule
from memfit.errors import InputError
from memfit.job import Nets
from memfit.plan import MODES


@contextmanager
def recompute(nets: Nets, modes: Mapping[str, str]) -> Iterator[None]:
    """Context in which the modules at these paths keep, recompute or offload as their mode says.

    Raises:
        InputError: an unknown mode or module.
    """
    for path, mode in modes.items():
        if mode not in MODES:
            raise InputError(f"checkpointing {path} = {mode!r}", "no such mode", f"write one of {', '.join(MODES)}")
    changed = {path: find_module(nets, path) for path, mode in modes.items() if mode != "keep"}
    modules = {path: module for path, module in changed.items() if not isinstance(module, AbsentModule)}
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
            with saved_tensors_on_host(module):
                return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts((args, kwargs)), **kwargs)

    def contexts(arguments: Any) -> Any:
        first, again = selective_contexts() if mode == "selective" else (nullcontext(),) * 2
        state = ForwardState(module, arguments)
        return state.watched(first), state.again(again)

    return torch.compiler.disable(kept) if "torch._dynamo" in sys.modules else kept
