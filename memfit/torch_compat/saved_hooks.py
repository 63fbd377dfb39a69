"""The hooks of saved tensors, which torch before 2.8 does not name: there, those that were pushed are remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Hooks = tuple[Callable[..., Any], Callable[..., Any]]
"""What packs a saved tensor, and what unpacks it."""


class _Pushed(threading.local):
    """The hooks of this thread, the innermost last."""

    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


def _remembering(autograd: Any) -> Callable[[bool], Hooks | None]:
    """Replaces the functions that push and pop hooks by ones that remember them; gives what says the innermost."""
    pushed, push, pop = _Pushed(), autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks

    def push_and_remember(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        push(pack, unpack)
        pushed.hooks.append((pack, unpack))

    def pop_and_forget() -> None:
        pop()
        if pushed.hooks:
            pushed.hooks.pop()

    autograd._push_saved_tensors_default_hooks = push_and_remember
    autograd._pop_saved_tensors_default_hooks = pop_and_forget
    return lambda ignore_is_tracing: pushed.hooks[-1] if pushed.hooks else None


_autograd: Any = torch._C._autograd
_torchs_own = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
top_saved_tensors_hooks: Callable[[bool], Hooks | None] = _torchs_own or _remembering(_autograd)
"""The hooks that a saved tensor would go through now; None where there are none."""
