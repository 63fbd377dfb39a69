"""Operators that have one kernel on CUDA, where a backend without kernels is given their mathematics in steps.

Autograd takes the steps of an operator with a CompositeImplicitAutograd kernel (math_silu_backward: six temporaries)
for any device without a kernel of its own. native_functions.yaml of torch 2.13 names three of these with a CUDA
kernel. The kernels registered here are never run: a fake tensor mode answers before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

FUSED_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")


def _never_run(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel of the virtual GPU was run on a tensor that is not fake")


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """The operators above are one operator each on the virtual device."""
    with torch.library._scoped_library("aten", "IMPL", "PrivateUse1") as library:
        for name in FUSED_ON_CUDA:
            library.impl(name, _never_run)
        yield
