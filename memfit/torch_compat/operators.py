"""Operators of torch by name, where a version may lack some of them."""

from __future__ import annotations

from typing import Any

import torch

ABSENT = {"_fused_rms_norm_backward.default": (2, 9)}
"""Operators that older versions lack, and the first version that has them. Every other one must be there."""


def operator(name: str) -> Any:
    """The overload ``mm.default`` of ``torch.ops.aten``.

    Raises:
        AttributeError: this version has none.
    """
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def has_operator(name: str) -> bool:
    """Whether this version of torch has an overload."""
    try:
        operator(name)
    except AttributeError:
        return False
    return True


def optional(name: str) -> Any:
    """The overload; where this version lacks it, a key that no call has."""
    return operator(name) if has_operator(name) else name
