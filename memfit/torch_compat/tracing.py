"""torch's private names that the virtual device alone needs; they take torch a second to import."""

from __future__ import annotations

from typing import Any

from memfit.torch_compat.versions import lacks

try:
    import torch._meta_registrations as shape_functions
    import torch.optim.optimizer as optimizer_module
    import torch.utils._foreach_utils as foreach_module
    from torch._dynamo import trace_rules
except (ImportError, AttributeError) as error:
    raise lacks(error) from error


def foreach_types() -> tuple[list[Any], list[Any]]:
    """The lists of classes of tensors on which optimizers run for-each operators."""
    return optimizer_module._foreach_supported_types, foreach_module._foreach_supported_types


__all__ = ["foreach_types", "shape_functions", "trace_rules"]
