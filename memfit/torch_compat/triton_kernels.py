"""torch's operator that starts a user's Triton kernel, as ``torch.library.wrap_triton`` makes it."""

from __future__ import annotations

from typing import Any

from memfit.torch_compat.versions import lacks

try:
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
except (ImportError, AttributeError) as error:
    raise lacks(error) from error


def pass_triton_kernels(mode: type) -> None:
    """Under a mode of this class, such a kernel does nothing: it writes to the tensors that it is given."""
    if mode not in triton_kernel_wrapper_mutation.python_key_table:
        triton_kernel_wrapper_mutation.py_impl(mode)(_nothing)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


__all__ = ["pass_triton_kernels"]
