"""torch's private names of selective checkpointing: the storage of the kept outputs, and the modes that write and read
it."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from memfit.torch_compat.versions import lacks

try:
    from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
    from torch.utils._python_dispatch import _pop_mode_temporarily as dispatch_mode_popped
    from torch.utils.checkpoint import _CachedTorchDispatchMode as CachedOutputs
    from torch.utils.checkpoint import _CachingTorchDispatchMode as CachingOutputs

    FLEX_DEVICE_CHECK = "_validate_device"
    """The function of ``torch.nn.attention.flex_attention`` that refuses devices without the kernels."""
    IS_KEYED = hasattr(torch_checkpoint, "_RECOMPUTE")
    """Whether torch's storage is a dictionary of numbered outputs (from 2.13 on), which also has entries for outputs
    without a tensor. Before, it is a list for each operator."""
    RECOMPUTE: Any = torch_checkpoint._RECOMPUTE if IS_KEYED else object()
    """The entry of the storage for an output that is recomputed."""
    storage_key: Any = torch_checkpoint._sac_storage_key if IS_KEYED else None
    """(operator, arguments) -> the key of their outputs in the storage; None before 2.13."""
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

__all__ = [
    "FLEX_DEVICE_CHECK", "IS_KEYED", "RECOMPUTE", "CachedOutputs", "CachingOutputs", "dispatch_mode_popped",
    "flex_operator", "storage_key",
]  # fmt: skip
