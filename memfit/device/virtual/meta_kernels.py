"""Views, pointwise and structured operators by torch's own kernels for meta tensors, those of lists of tensors, copies
to another device or type, and operators that only write, to ``out`` or to what they are given.

FakeTensorMode decomposes many of these in Python, for the sake of symbolic shapes, at up to fifty times the cost, and
with other strides of dimensions of one than a real run has. A trace has no symbols. What it has, devices, is plain
where every tensor of a call lies on the same one.

A structured operator (``structured_delegate`` in native_functions.yaml) computes its outputs' shapes by the same code
for every device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.data_dependent import NOT_HANDLED
from memfit.torch_compat import DisableTorchDispatch, FakeTensor, OpOverload, has_computed_kernel, has_kernel
from memfit.torch_compat.attributes import schema_of
from memfit.torch_compat.tracing import python_shape_functions

_META = torch.device("meta")
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
_STRUCTURED = "CompositeExplicitAutogradNonFunctional"
_aten = torch.ops.aten
_TO_COPY = _aten._to_copy.default
_LIKE = frozenset(
    {_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default}
)  # fmt: skip
_CHANGES_ITS_SHAPE = frozenset(
    {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)  # fmt: skip


@cache
def suits(func: Any) -> bool:
    """Whether an operator is a view, pointwise, structured, of lists of tensors, a copy of another type or device, a
    new tensor like another one, or one that writes to its first argument, and torch has its kernel."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or _CHANGES_ITS_SHAPE & set(func.tags):
        return False
    is_plain = func.is_view or torch.Tag.pointwise in func.tags or func in _LIKE
    if not (is_plain or _fills(func) or _gives_lists(func) or _is_structured(func)):
        return func is _TO_COPY
    return bool(has_computed_kernel(func.name(), "Meta"))


@cache
def only_writes(func: Any) -> bool:
    """Whether an operator gives nothing but what it writes to its arguments, and torch has no kernel of it for meta
    tensors: the steps of fused optimizers (``_fused_sgd_``).
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten" or schema_of(func).returns:
        return False
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in schema_of(func).arguments)
    return writes and not any(has_kernel(func.name(), key) for key in ("Meta", *_COMPOSITE))


@cache
def outs_without_kernel(func: Any) -> tuple[str, ...]:
    """The ``out`` arguments that an operator fills and gives back, where torch has no kernel of it for meta tensors, as
    of ``_scaled_mm.out``, which compiled layers of Float8 call. Empty for any other operator, and where data tell the
    size."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return ()
    packet = func.overloadpacket
    if any(_CHANGES_ITS_SHAPE & set(getattr(packet, name).tags) for name in packet.overloads()):
        return ()
    outs = tuple(
        each.name
        for each in schema_of(func).arguments
        if each.kwarg_only and each.alias_info is not None and each.alias_info.is_write
    )
    if len(outs) != len(schema_of(func).returns):
        return ()
    return () if any(has_kernel(func.name(), key) for key in ("Meta", _STRUCTURED, *_COMPOSITE)) else outs


def _gives_lists(func: Any) -> bool:
    """Whether it gives new tensors for a list of tensors: ``_foreach_sqrt``, ``_foreach_norm``. Their kernel for meta
    tensors goes through the list."""
    is_writing = any(each.alias_info is not None for each in schema_of(func).arguments)
    return func.name().startswith("aten::_foreach_") and bool(schema_of(func).returns) and not is_writing


def _is_structured(func: Any) -> bool:
    """Whether it is structured, and gives new tensors: such an operator alone has a kernel under this key.

    Not where torch has a function in Python for its shapes: that may ask for the device, which a meta tensor hides.
    """
    if func in python_shape_functions or any(each.alias_info is not None for each in schema_of(func).arguments):
        return False
    return bool(has_kernel(func.name(), _STRUCTURED))


def _fills(func: Any) -> bool:
    """Whether it overwrites its only tensor: ``uniform_``, ``zero_``."""
    schema = schema_of(func)
    arguments = schema.arguments
    tensors = [argument for argument in arguments if "Tensor" in str(argument.type)]
    written = [argument for argument in tensors if argument.alias_info is not None and argument.alias_info.is_write]
    return len(tensors) == len(written) == len(schema.returns) == 1 and tensors[0] is arguments[0]


def run(func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
    """The outputs as meta tensors, on ``device_of``, or one of ``tensors`` where it is returned itself; else
    NOT_HANDLED.

    Args:
        tensors: the fake tensors among the arguments, in order.
    """
    if only_writes(func):
        return None
    if names := outs_without_kernel(func):
        outs = tuple(kwargs[name] for name in names)
        return outs[0] if len(outs) == 1 else outs
    if not suits(func) or not tensors:
        return NOT_HANDLED
    device = tensors[0].fake_device
    if any(tensor.fake_device != device or tensor.is_complex() for tensor in tensors):
        return NOT_HANDLED
    if func is _TO_COPY and device.type != "meta" and _is_copied_to_a_device(kwargs):
        kwargs = {**kwargs, "device": None}
    if any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
        return NOT_HANDLED
    with DisableTorchDispatch():
        stand_ins = iter(own := [_stand_in(tensor) for tensor in tensors])
        given, named = _replaced(args, stand_ins), _replaced(tuple(kwargs.values()), stand_ins)
        out = func(*given, **dict(zip(kwargs, named, strict=True)))
    same = {id(stand_in): tensor for stand_in, tensor in zip(own, tensors, strict=True)}
    if isinstance(out, list | tuple):
        return type(out)(same.get(id(output), output) for output in out)
    return same.get(id(out), out)


def device_of(func: Any, kwargs: Any, tensors: list[FakeTensor]) -> torch.device:
    """Where the outputs of a call are that ``run`` has handled."""
    to = kwargs.get("device") if func is _TO_COPY else None
    return tensors[0].fake_device if to is None else to


def _is_copied_to_a_device(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and device.type != "meta" and not kwargs.get("pin_memory")


def _stand_in(tensor: Tensor) -> Tensor:
    """A plain meta tensor over the same storage."""
    alias = torch.empty_strided((0,), (1,), dtype=tensor.dtype, device=_META)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _replaced(values: Any, stand_ins: Any) -> Any:
    if isinstance(values, FakeTensor):
        return next(stand_ins)
    return [_replaced(value, stand_ins) for value in values] if isinstance(values, list | tuple) else values
