"""bitsandbytes' paged optimizers: their state is managed memory, which the driver moves between the card and its host.

bitsandbytes gives it as a tensor of the CPU (``get_paged``), prefetches it to the card around a step, and lets the
driver evict it where the card is full. It is no part of the allocator's memory, and is counted as the host's, where all
of it must have room.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODULE = "bitsandbytes.functional"


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    """Managed memory as a tensor of the CPU, with what bitsandbytes asks of one."""
    paged: Any = torch.empty(shape, dtype=dtype, device="cpu")
    paged.is_paged, paged.page_deviceid = True, getattr(device, "index", 0)
    made: Tensor = paged
    return made


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Moves or fills managed memory: neither changes what is allocated."""


def replacements(module: ModuleType) -> dict[str, Any]:
    """What stands in for the functions that call the CUDA library, of those that this version has."""
    made = {"get_paged": _get_paged, "prefetch_tensor": _nothing, "fill": _nothing}
    return {name: function for name, function in made.items() if hasattr(module, name)}
