"""Selective recomputation: keeps the outputs of matmuls, convolutions and attention, and recomputes the rest.

torch's selective checkpointing keeps every such output. Recomputation stops at the last tensor that the backward needs,
so an output that comes after that (a block's last matmul, which is only added to something) is never read. It is
released when the forward ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit.torch_compat import top_saved_tensors_hooks
from memfit.torch_compat.selective_checkpoint import IS_KEYED, RECOMPUTE, CachedOutputs, storage_key

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
    """Returns the contexts of a forward and of its recomputation, for torch.utils.checkpoint."""
    kept: list[tuple[Any, int, int]] = []
    """Of each kept output: its place in the storage, and how many tensors were saved before it was there."""
    saved = [0]

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in COSTLY:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            kept.append((*_place(first, operator, args), saved[0]))
        return CheckpointPolicy.MUST_SAVE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    first = contexts[0]
    again = _Recomputation(policy, first.storage, False)

    @contextmanager
    def forward() -> Iterator[None]:
        with _counting(saved), first:
            yield
        for key, index, before in kept:
            if before == saved[0]:
                first.storage[key][index] = RECOMPUTE

    return forward(), again


def _place(first: Any, operator: Any, args: Any) -> tuple[Any, int]:
    """The slot of torch's storage that will hold the output of a call: before torch 2.13, a list for each operator."""
    if not IS_KEYED:
        return operator, len(first.storage[operator])
    key = storage_key(operator, args)
    return key, first.func_counter[key] - 1


class _Recomputation(CachedOutputs):
    """A recomputation that reads the kept outputs and nothing else. torch 2.13 counts every operator, but an engine
    that gathers parameters within the module does not run the same operators twice.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in COSTLY:
            return func(*args, **(kwargs or {}))
        outputs = None if IS_KEYED else self.storage.get(func)
        if outputs and outputs[0] is RECOMPUTE:
            outputs.pop(0)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _counting(saved: list[int]) -> Iterator[None]:
    """Counts what the checkpoint's own hooks are asked to save."""
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
