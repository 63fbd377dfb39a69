"""Tensors that are written to with values that are not known."""

from __future__ import annotations

from typing import Any

from memfit.device.virtual.assumptions import ASSUMED
from memfit.torch_compat import FakeTensor
from memfit.trace.finite_checks import TRUTH

KNOWN = "_memfit_value"
"""The attribute of a tensor with its content, as ``memfit.trace.constant_values`` notes it."""


def forget(tensor: Any) -> None:
    """Notes that a tensor's content, also as its views have it, is not known any more."""
    if not isinstance(tensor, FakeTensor):
        return
    for name in (ASSUMED, TRUTH):
        tensor.__dict__.pop(name, None)
    content = tensor.__dict__.pop(KNOWN, None)
    if content is not None:
        content.memory.is_known = False
