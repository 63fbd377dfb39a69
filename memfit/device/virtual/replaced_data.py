"""``tensor.data = value`` where a real tensor becomes fake, or a fake one changes its device: torch allows neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memfit.torch_compat import FakeTensor

DATA: Any = Tensor.data
"""torch's own descriptor."""


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Sets the data of ``tensor``: a buffer of real numbers, say, gets what was computed of parameters.

    Where a graph holds the real tensor, that one stays if it has the shape and the type: its bytes are those of the
    new one.
    """
    if not isinstance(value, FakeTensor) or getattr(tensor, "fake_device", None) == value.fake_device:
        DATA.__set__(tensor, value)
        return
    moved: Tensor = value.detach()
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    elif tensor.is_leaf:
        moved.requires_grad_(tensor.requires_grad)
    own = {name: held for name, held in vars(tensor).items() if name not in vars(moved)}
    kind = type(tensor) if isinstance(tensor, FakeTensor) else type(moved)
    try:
        torch.utils.swap_tensors(tensor, moved)
    except RuntimeError:
        if isinstance(tensor, FakeTensor) or (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise
        return
    tensor.__class__ = kind
    vars(tensor).update(own)
