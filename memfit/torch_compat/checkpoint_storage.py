"""torch's private names for the storage of distributed checkpoints."""

from __future__ import annotations

from memfit.torch_compat.versions import lacks

try:
    from torch.distributed._shard._utils import narrow_tensor_by_index
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

__all__ = ["StorageInfo", "narrow_tensor_by_index", "set_element"]
