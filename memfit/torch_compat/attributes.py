"""Private attributes and methods of torch's objects: what memfit reads of them, and for what.

Each was seen in every version that docs/versions.md lists as tested. A version that lacks one fails at its first use
with an AttributeError that names it. tests/torch_compat/test_private_names.py holds all other modules to these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memfit.torch_compat.versions import lacks

try:
    from torch._C import _are_functorch_transforms_active
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
    from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys

    make_subclass: Any = Tensor._make_subclass
    """Makes a tensor of a subclass on the same storage: for fake tensors and parameters."""
    make_wrapper_subclass: Any = Tensor._make_wrapper_subclass
    """Makes a tensor of a subclass with a shape and no storage."""
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

MODULE_CALL = "_call_impl"
"""The method of a module that calls its hooks and its forward."""
MAKE_SUBCLASS, MAKE_WRAPPER_SUBCLASS, MODULE_APPLY, CONVOLUTION_LAYOUT, RAW_STREAM = (
    "_make_subclass", "_make_wrapper_subclass", "_apply", "_conv_determine_backend_memory_format",
    "_cuda_getCurrentRawStream",
)  # fmt: skip
"""For patches: two of Tensor; of Module (``to``, ``half`` and ``cuda`` call it); of ``c_bindings``, the layout of a
convolution's output and the stream that a CPU build has not."""
TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
"""For patches: the function of ``torch.nn.init`` that draws again what fell outside of its bounds."""
HELD_BY_MODULES = ("_parameters", "_buffers", "_modules")
"""The dicts of a module that hold tensors on purpose."""

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's C++ object, which tensors that share it have in common, and which fake storages have, too:
their ``data_ptr`` is 0."""
version_of: Callable[[Any], int] = attrgetter("_version")
"""How often a tensor was written to in place, as autograd counts it."""
use_count: Callable[[Tensor], int] = methodcaller("_use_count")
"""References that torch's C++ holds to a tensor."""
is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether autograd takes a tensor for a view of another, of which autocast keeps no copy."""
view_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that autograd takes a tensor for a view of; None where it is no view."""
is_zero_tensor: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")
"""Whether a tensor is all zeros without memory, as the tangents of what has none are in forward-mode autograd."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's schema: names of its arguments, and which of them it writes to."""
sequence_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number that autograd gave to a node in its forward: by it, a backward's operator finds its module and line."""
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own buffers and parameters by name, to be read once for each module that holds them, and replaced."""
transient_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Names of a module's own buffers that its state_dict leaves out."""


SPARSE_PARTS = "_memfit_sparse_parts"
"""Attribute of a fake COO tensor, which holds nothing itself: ``indices`` and ``values`` of a trace."""


def are_transforms_active() -> bool:
    """Whether the code runs within ``torch.func``'s transforms."""
    return _are_functorch_transforms_active()


def current_module_apply() -> Callable[..., nn.Module]:
    """``Module._apply`` as it is now."""
    return nn.Module._apply


@contextmanager
def fake_parameters_swapped(module: nn.Module) -> Iterator[None]:
    """A context in which ``Module._apply`` keeps a module's own parameters where they are fake: it swaps tensors.

    An optimizer that was made before holds them still. From 2.8 on torch does so without it.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    fake = any(isinstance(parameter, FakeTensor) for parameter in own_parameters(module).values())
    torch.__future__.set_swap_module_params_on_conversion(before or fake)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def storage_id_of(tensor: Tensor) -> int:
    """``storage_id`` of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(indices, values) of a COO tensor, with all of its entries; of one of a trace, those that the trace keeps."""
    kept = tensor.__dict__.get(SPARSE_PARTS)
    return (tensor._indices(), tensor._values()) if kept is None else (kept.indices, kept.values)


def stored_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors whose storages a real tensor has: its own, of a COO tensor those of its parts, of others none."""
    if tensor.layout is torch.strided:
        return (tensor,)
    return sparse_parts(tensor) if tensor.layout is torch.sparse_coo else ()


def is_recorded_sparse(tensor: Tensor) -> bool:
    """Whether the parts of a COO tensor are known: it is real, or a trace keeps them."""
    return SPARSE_PARTS in tensor.__dict__ or not isinstance(tensor, FakeTensor)


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's storage; of a sparse one, of the storages of its parts; 0 where it has none of its own."""
    if tensor.layout is torch.sparse_coo:
        return sum(map(stored_bytes, sparse_parts(tensor)))
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sum(map(stored_bytes, (tensor.crow_indices(), tensor.col_indices(), tensor.values())))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sum(map(stored_bytes, (tensor.ccol_indices(), tensor.row_indices(), tensor.values())))
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # of a library of kernels, or of a subclass without memory
        return 0


def local_tensor(tensor: Any) -> Any:
    """The shard of this rank where a tensor is a DTensor, without the autograd of ``to_local``; within ``torch.func``
    (``vmap``, ``grad``), the tensor that is wrapped; else the tensor itself.
    """
    unwrapped = without_transforms(tensor)
    return getattr(unwrapped, "_local_tensor", unwrapped)


def without_transforms(tensor: Any) -> Any:
    """Within ``torch.func`` (``vmap``, ``grad``), the tensor that is wrapped; else the tensor itself."""
    while isinstance(tensor, Tensor) and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def local_storage_id(tensor: Any) -> int:
    """Tells the storage of a tensor, or of its shard on this rank, which operators may also write to by itself."""
    return storage_id_of(local_tensor(tensor))


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors with storage of their own that a tensor holds: of a DTensor, this rank's shard; of a quantized
    tensor, its codes, scales and tables; of a sparse one, its indices and values; else the tensor itself.
    """
    local = local_tensor(tensor)
    if local.layout is torch.sparse_coo:
        yield from sparse_parts(local)
        return
    if local is not tensor or not is_traceable_wrapper_subclass(tensor):
        yield local
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from inner_tensors(getattr(tensor, name))


def each_module(net: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and those within it, as ``Module.modules`` does, which passes each through as many generators as
    modules lie around it.
    """
    seen, waiting = set[int](), list[nn.Module | None]([net])
    while waiting:
        module = waiting.pop()
        if module is None or (key := id(module)) in seen:
            continue
        seen.add(key)
        yield module
        waiting += reversed(module._modules.values())


def each_parameter(net: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a module and of those within it; one that several hold comes several times."""
    for module in each_module(net):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


def apply_to_tensors(net: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer of a module by what ``function`` makes of it, as ``Module.to`` does."""
    net._apply(function)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody has registered a hook before or after an optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """What somebody has registered to be called before or after an optimizer's step."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def has_load_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody has registered a hook before or after an optimizer loads its state."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def with_versions_of(values: Any, net: nn.Module) -> Any:
    """A state_dict with the versions of a net's modules, which their ``load_state_dict`` looks at."""
    values._metadata = getattr(net.state_dict(), "_metadata", None)
    return values


def has_communication_hook(module: nn.parallel.DistributedDataParallel) -> bool:
    """Whether ``register_comm_hook`` was called."""
    return bool(module._comm_hooks)


def unsharded_gradient(parameter: Any) -> Tensor | None:
    """The gradient that a rank holds whole of a parameter of FSDP2, until it is scattered."""
    held: Tensor | None = parameter.unsharded_accumulated_grad
    if held is None and hasattr(parameter, "_unsharded_param"):
        held = parameter._unsharded_param.grad
    return held


def fake_outputs(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What torch's own FakeTensorMode gives for a call, without its caches."""
    return mode._dispatch_impl(func, types, args, kwargs)


@contextmanager
def from_cpu_data() -> Iterator[None]:
    """Context in which ``torch.tensor`` makes its numbers on the CPU, and moves them to the device by an operator.

    A fake mode sets this where it is entered, but for its own thread alone, and autograd runs a backward in others.
    """
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


__all__ = [
    "CONVOLUTION_LAYOUT",
    "HELD_BY_MODULES",
    "MAKE_SUBCLASS",
    "MAKE_WRAPPER_SUBCLASS",
    "MODULE_APPLY",
    "MODULE_CALL",
    "RAW_STREAM",
    "SPARSE_PARTS",
    "IncompatibleKeys",
    "apply_to_tensors",
    "current_module_apply",
    "fake_outputs",
    "fake_parameters_swapped",
    "from_cpu_data",
    "has_communication_hook",
    "has_load_hooks",
    "has_step_hooks",
    "inner_tensors",
    "is_recorded_sparse",
    "is_view",
    "local_storage_id",
    "local_tensor",
    "make_subclass",
    "make_wrapper_subclass",
    "own_buffers",
    "own_parameters",
    "schema_of",
    "sequence_number_of",
    "sparse_parts",
    "step_hooks",
    "storage_id",
    "storage_id_of",
    "stored_parts",
    "transient_buffers_of",
    "unsharded_gradient",
    "use_count",
    "version_of",
    "with_versions_of",
]  # fmt: skip
