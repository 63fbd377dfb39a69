"""cuDNN's search for the fastest plan (``torch.backends.cudnn.benchmark = True``), as far as memory sees it.

At the first sight of every (convolution, pass) PyTorch tries cuDNN's plans, each with its workspace, and then empties
the allocator's cache (ATen/native/cudnn/Conv_v7.cpp and Conv_v8.cpp, after every search). The emptied cache is what
the following steps build on. The trials' workspaces are not modelled: they are clipped to free memory and given back,
so that they show in a reading of the card but make no run fail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.layout_copies import convolution_layout

_aten = torch.ops.aten
FORWARD, BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
CONVOLUTIONS = frozenset({FORWARD, BACKWARD})

Plan = tuple[Any, ...]
"""What PyTorch keeps a plan for: a pass (forward, gradient of the input or of the weight) and a problem."""


def plans(func: Any, args: Any) -> tuple[Plan | None, ...]:
    """The plans of a convolution or its backward, by output; None for an output that is not asked for or that cuDNN
    does not make: of float64, and of depthwise convolutions in the plain layout, which have kernels of PyTorch's own.
    """
    wanted: tuple[str | None, ...]
    if func is BACKWARD:
        x, weight, (stride, padding, dilation, transposed, _, groups) = args[1], args[2], args[4:10]
        wanted = tuple(name if asked else None for name, asked in zip(("input", "weight"), args[10], strict=False))
    else:
        x, weight, (stride, padding, dilation, transposed, _, groups) = args[0], args[1], args[3:9]
        wanted = ("forward",)
    if x.dtype is torch.float64 or not torch.backends.cudnn.enabled or _is_native(x, weight, groups):
        return (None,) * len(wanted)
    problem = (
        tuple(x.shape), tuple(weight.shape), tuple(stride), tuple(padding), tuple(dilation), transposed, groups,
        x.dtype, convolution_layout(x, weight),
    )  # fmt: skip
    return tuple(None if name is None else (name, *problem) for name in wanted)


def _is_native(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Depthwise in the plain layout. Some of them in float16 are cuDNN's, which is left out."""
    return groups > 1 and groups == x.shape[1] and convolution_layout(x, weight) is torch.contiguous_format
