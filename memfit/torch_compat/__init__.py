"""torch's private names, in one place: what memfit uses each for, and what differs between versions.

Every other module imports them from here, under a public name, and none reaches into torch on its own
(tests/torch_compat/test_private_names.py). The versions that have all of them are those of docs/versions.md. In: the
installed torch. Out: names; InputError where the version is too old, or lacks one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat.versions import lacks, refuse_old

refuse_old()

try:
    import torch._prims_common as prims
    from torch._ops import OpOverload
    from torch._prims_common import suggest_memory_format
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        is_traceable_wrapper_subclass,
        is_traceable_wrapper_subclass_type,
    )
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
    from torch.utils._pytree import arg_tree_leaves, tree_flatten, tree_map, tree_map_only, tree_unflatten

    from memfit.torch_compat.saved_hooks import top_saved_tensors_hooks

    c_bindings = torch._C
    """For patches: torch's Python code looks functions up in it."""
    current_autograd_node: Any = c_bindings._current_autograd_node
    """The autograd node whose backward runs in this thread; None outside of a backward."""
    sequence_number: Any = torch.autograd._get_sequence_nr
    """The number that autograd gives to the next node."""
    engine_run_backward: Any = torch.autograd._engine_run_backward
    """What runs a backward; ``torch.autograd`` looks it up under this name, so that it can be replaced."""
    storage_use_count: Any = c_bindings._storage_Use_Count
    """References to a storage, of C++ and Python; ``tensor._use_count()`` is the same of a tensor."""
    warn_on_data_pointer: Any = c_bindings._set_warn_deprecated_on_mutable_data_ptr
    """What FakeTensor's own constructor sets on a tensor."""
    DisableTorchFunction: Any = c_bindings.DisableTorchFunction
    DisableTorchDispatch: Any = c_bindings._DisableTorchDispatch
    """Contexts in which tensors are plain."""
    EnableTorchFunction: Any = c_bindings._EnableTorchFunction
    """A context inside of DisableTorchFunction in which they are not."""
    DispatchKey: Any = c_bindings.DispatchKey
    DispatchKeySet: Any = c_bindings.DispatchKeySet
    ExcludeDispatchKeys: Any = c_bindings._ExcludeDispatchKeyGuard
    """For autocast kernels that are written in Python."""
    dispatch_depth: Any = c_bindings._len_torch_dispatch_stack
    """How many dispatch modes are entered."""
    _below_autograd: Any = c_bindings._AutoDispatchBelowAutograd
    has_kernel: Any = c_bindings._dispatch_has_kernel_for_dispatch_key
    has_computed_kernel: Any = c_bindings._dispatch_has_computed_kernel_for_dispatch_key
    """Whether an operator has a kernel for a dispatch key: of its own, or any."""
    scoped_library: Any = torch.library._scoped_library
    """A library whose kernels go when a context is left."""
    Generator: Any = c_bindings.Generator
    """The class of generators, while ``torch.Generator`` is another one."""

    def is_dense(tensor: Tensor) -> bool:
        """Whether a tensor's elements lie side by side, in any order of its dimensions."""
        return bool(_is_dense(tensor))

    _VIEWS: Any = DispatchKeySet(DispatchKey.ADInplaceOrView)

    _NAMES = ("is_non_overlapping_and_dense_or_false", "is_non_overlapping_and_dense")
    """Of one function: from torch 2.11 on, and before."""
    _is_dense: Any = getattr(prims, next((name for name in _NAMES if hasattr(prims, name)), _NAMES[0]))
except (ImportError, AttributeError) as error:
    raise lacks(error) from error


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context of an operator's call in inference mode that is dispatched as outside of it.

    A dispatch mode is reached below autograd; leaving inference mode alone enters autograd once more, which then makes
    a view of a view that is one already, and fails.
    """
    with torch.inference_mode(False), torch.no_grad(), _below_autograd(), ExcludeDispatchKeys(_VIEWS):
        yield


def default_device_context() -> Any:
    """The context that ``torch.set_default_device`` has entered in this thread; None where there is none."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def forget_default_device() -> None:
    """After ``torch.set_default_device(None)`` torch before 2.10 fails to say its default device; after this it does
    not."""
    if default_device_context() is None:
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def in_dynamo(function: Any) -> Any:
    """``function``, left alone by torch.compile where that was imported."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


__all__ = [
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DispatchKey",
    "DispatchKeySet",
    "DynamicOutputShapeException",
    "EnableTorchFunction",
    "ExcludeDispatchKeys",
    "FakeTensor",
    "FakeTensorMode",
    "Generator",
    "OpOverload",
    "TorchDispatchMode",
    "arg_tree_leaves",
    "c_bindings",
    "current_autograd_node",
    "current_dispatch_mode",
    "default_device_context",
    "disable_current_modes",
    "engine_run_backward",
    "forget_default_device",
    "has_computed_kernel",
    "has_kernel",
    "in_dynamo",
    "is_dense",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "outside_inference_mode",
    "scoped_library",
    "sequence_number",
    "storage_use_count",
    "suggest_memory_format",
    "top_saved_tensors_hooks",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "warn_on_data_pointer",
]  # fmt: skip
