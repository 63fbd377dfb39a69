"""Operators that keep integers as the numbers that they are: casts, and resizing to the nearest element.

A mask of images is resized so, ``interpolate(mask.float(), size=size).long()``, and code cuts images by it.
"""

import torch

_aten = torch.ops.aten
KEEPS_INTEGERS = frozenset(
    {_aten._to_copy.default}
    | {
        getattr(getattr(_aten, f"{name}{dims}d"), overload)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for dims in (1, 2, 3)
        for overload in ("default", "vec")
    }
)
"""What they give of known integers is known too, where it is floating point numbers."""
