"""Batch check: whether a job's made-up batches grow with the items that are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.device.virtual.library_patches import as_in_a_real_run
from memfit.device.virtual.virtual_device import virtual_cpu
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.nested_tensors import map_tensors
from memfit.printable import shortened
from memfit.torch_compat import disable_current_modes

MANY = 64
"""Items of a batch that must differ from a batch of one item."""


def check_batch(job: Job, shape: Shape) -> None:
    """Checks a job before a prediction or a search, where it is asked for more than one item.

    What ``batch()`` raises here is not reported: the trace of the step reports it, where it matters.

    Raises:
        InputError: a batch of many items holds tensors of the same sizes as a batch of one item.
    """
    if shape.items == 1:
        return
    try:
        with disable_current_modes(), virtual_cpu() as virtual, as_in_a_real_run(), virtual.device:
            single, many = (_content(job.batch(replace(shape, items=items))) for items in (1, MANY))
    except Exception:
        return
    if single is None or single != many or not any(isinstance(size, tuple) for size in single):
        return
    sizes = ", ".join("x".join(map(str, size)) or "a scalar" for size in single if isinstance(size, tuple))
    raise InputError(
        f"{type(job).__name__}.batch()",
        f"its tensors have the same sizes for {MANY} items as for 1: {shortened(sizes, 60)}",
        "write batch(self, shape) -> tensors of shape.items samples",
    )


def _content(batch: Any) -> list[Any] | None:
    """The sizes of a batch's tensors and its other values; None where it holds objects that may have tensors."""
    content: list[Any] = []
    whole = True

    def other(value: Any) -> Any:
        nonlocal whole
        content.append(list(value) if isinstance(value, tuple) else value)
        whole = whole and (value is None or isinstance(value, bool | int | float | str | bytes | list | tuple))
        return value

    def size(tensor: Any) -> Any:
        content.append(tuple(tensor.shape))
        return tensor

    map_tensors(batch, size, other)
    return content if whole else None
