"""Selective recompute: the outputs of matmuls, convolutions and attention are kept, the rest is computed again.

torch's selective checkpointing keeps every such output. Recomputing stops at the last tensor that the backward needs,
so what a product gives after that (a block's last one, which is only added to something) is never looked up: it is let
go of when the forward ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit.torch_compat import top_saved_tensors_hooks

_aten = torch.ops.aten
COSTLY = frozenset(
    {
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)  # fmt: skip
"""The operators whose outputs are kept."""


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and of its recomputing, for torch.utils.checkpoint."""
    kept: list[tuple[Any, int, int]] = []
    """Of each kept output: its place in the storage, and how many tensors were saved before it was there."""
    saved = [0]

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in COSTLY:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute and _RECOMPUTE is not None:
            key = torch_checkpoint._sac_storage_key(operator, args)
            kept.append((key, first.func_counter[key] - 1, saved[0]))
        return CheckpointPolicy.MUST_SAVE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    first = contexts[0]
    again = _Again(policy, first.storage, False)

    @contextmanager
    def forward() -> Iterator[None]:
        with _counting(saved), first:
            yield
        for key, index, before in kept:
            if before == saved[0]:
                first.storage[key][index] = _RECOMPUTE

    return (forward() if _RECOMPUTE is not None else first), again


class _Again(torch_checkpoint._CachedTorchDispatchMode):
    """A recomputing that looks up what is kept and nothing else. torch's own counts every operator (2.13), and an
    engine that gathers parameters inside of the module does not run the same ones twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in COSTLY:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


_RECOMPUTE: Any = getattr(torch_checkpoint, "_RECOMPUTE", None)
"""What stands in the storage for an output that is computed again; None: a torch that has another storage."""


@contextmanager
def _counting(saved: list[int]) -> Iterator[None]:
    """Counts what the checkpoint's own hooks are given to save."""
    hooks: Any = top_saved_tensors_hooks(True)
    if hooks is None:
        saved[0] = -1
        yield
        return
    pack, unpack = hooks

    def counted(tensor: torch.Tensor) -> Any:
        saved[0] += 1
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(counted, unpack):
        yield
