"""FSDP1 as litgpt's scripts ask Lightning for it: a unit for each block, whose activations are recomputed."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def sharded(net: nn.Module, device: torch.device) -> nn.Module:
    """litgpt's net in bf16 over the ranks of the process group.

    The scripts' ``FSDPStrategy`` has both policies of ``{Block}`` and ``limit_all_gathers``. Lightning adds
    ``use_orig_params``, its mixed precision of ``bf16-true``, and checkpoints that are not re-entrant.
    """
    block: Any = type(net.transformer.h[0])  # type: ignore[union-attr, index]
    half = torch.bfloat16
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*(requires_grad|device_id)")
        made = FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({block}),
            mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half),
            device_id=device,
            use_orig_params=True,
            limit_all_gathers=True,
        )
    again = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(made, checkpoint_wrapper_fn=again, check_fn=lambda module: isinstance(module, block))
    return made


def synced(net: nn.Module, *, when: bool) -> contextlib.AbstractContextManager[None]:
    """``Fabric.no_backward_sync``: an iteration without a step leaves whole, unreduced gradients on every rank."""
    return contextlib.nullcontext() if when else net.no_sync()  # type: ignore[operator, no-any-return]
