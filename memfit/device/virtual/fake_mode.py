"""A fake tensor mode that remembers: an operator on arguments of known shapes gives outputs of known shapes.

FakeTensorMode has such a memory too; its keys and the tensors that it makes cost most of a trace's time. This one
keeps to what a training step does often (plain strided tensors, no symbols) and leaves the rest to FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual import grouped_products, meta_kernels, norm_shapes
from memfit.device.virtual.assumptions import Assumptions, source_line
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.call_keys import call_key, is_lazy, lazy_operators
from memfit.device.virtual.cuda_kernels import cuda_outputs
from memfit.device.virtual.data_dependent import NOT_HANDLED, answer_operator, asks_data
from memfit.device.virtual.output_layouts import laid_out, layout_of
from memfit.device.virtual.redirect import SaysCuda, redirected
from memfit.device.virtual.tensor_classes import is_plain_class, is_subclass_of_tensor
from memfit.errors import InputError
from memfit.torch_compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    DispatchKey,
    DynamicOutputShapeException,
    EnableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    has_kernel,
    outside_inference_mode,
    tree_map,
    warn_on_data_pointer,
)
from memfit.torch_compat.attributes import fake_outputs, make_subclass, schema_of, storage_id, storage_id_of

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_ITEM = _aten._local_scalar_dense.default
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_META = torch.device("meta")
_LIFT_FRESH = _aten.lift_fresh.default
_TO_COPY = _aten._to_copy.default
_NOT_LEARNT = frozenset({_ITEM, _LIFT_FRESH, _aten.lift.default, _aten.set_.source_Tensor})
_UNLEARNABLE_TAGS = frozenset(
    {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)  # fmt: skip

Make = Callable[["VirtualMode", list[FakeTensor]], Any]
"""Makes an operator's output from the tensors among its arguments."""


@dataclass(kw_only=True, eq=False, slots=True)
class Remembered:
    """A call that ran before, whose outputs depend on what is known of its arguments."""

    make: Make
    cost: tuple[int, int] | None = None
    """Its floating point operations and the bytes that it reads and writes, once they were counted."""
    is_seen: bool = False
    """Whether a tracer has seen it, and checked the types of its operands."""
    may_hold_content: bool = True
    """Whether the content of its outputs may be known, once a tracer has seen it."""


_calls: dict[tuple[Any, ...], Remembered] = {}


def _views_ordinary_tensor(func: Any, args: Any) -> bool:
    """Whether a call makes a view of a tensor from outside of inference mode: such a view is ordinary, too."""
    return bool(getattr(func, "is_view", False) and isinstance(args[0], FakeTensor) and not args[0].is_inference())


def _goes_to_the_card(args: Any, kwargs: Any) -> bool:
    """Whether a copy takes a real tensor to the virtual card, which torch before 2.10 would do with the real tensor."""
    device = (kwargs or {}).get("device")
    return device is not None and device.type == NAME and is_plain_class(type(args[0]))  # type: ignore[arg-type]


@cache
def _is_foreach_in_place(func: Any) -> bool:
    """These change no shape and return nothing, and their lists of scalars differ in every step of an optimizer."""
    name = str(func)
    return name.startswith("aten._foreach_") and name.split(".")[1].endswith("_") and not schema_of(func).returns


def _is_of_a_library(func: Any) -> bool:
    """Whether an operator's shapes come from a library's code (torch.library.register_fake), which says cuda."""
    return isinstance(func, OpOverload) and func.namespace not in ("aten", "prims")


def _places(tensors: list[FakeTensor]) -> dict[int, int]:
    """Where a tensor, by its id, or the first with a storage, by its address, stands among ``tensors``."""
    first = reversed(list(enumerate(tensors)))
    return {key: place for place, tensor in first for key in (storage_id_of(tensor), id(tensor))}


def _all_unknown(tensors: list[FakeTensor]) -> bool:
    return all(type(tensor) is FakeTensor and tensor.constant is None for tensor in tensors)


_CLASSES_AT = {torch.ops.aten.nll_loss_forward.default: 1, torch.ops.aten.nll_loss_backward.default: 2}
"""Losses over classes, and which argument the classes are."""
_LOSSES_OF_FULL_SIZE = frozenset(
    {
        _aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default,
        _aten.binary_cross_entropy.default,
    }
)  # fmt: skip
"""Losses whose kernels write every element into the output, reduce them and resize the output to a scalar, which frees
nothing (aten/src/ATen/native/Loss.cpp, aten/src/ATen/native/cuda/Loss.cu)."""
_MADE_LIKE_INPUT = frozenset({_aten.col2im.default, _aten.im2col.default})
"""Operators of ``fold`` and ``unfold``: the output is made of the input's size and resized. A smaller one frees nothing
(Col2Im.cpp and Im2Col.cpp in aten/src/ATen/native, and those of its folder cuda)."""


class VirtualMode(FakeTensorMode):
    """FakeTensorMode for tensors that live as long as a training run."""

    avoid_device_init = True
    """There is no device behind PrivateUse1: ``torch.tensor(..., device=...)`` must not fill one."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.on_gpu = on_gpu
        # A memo of fake tensors is a weak reference to each, and torch swaps no tensor (Module.to) that has one.
        self.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
        self.assumptions = Assumptions()
        """What was assumed of data so far."""
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualMode:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return _META if self.in_kernel_invocation else args[0].fake_device
        if func is _ITEM and type(args[0]) is FakeTensor and args[0].constant is not None:
            return args[0].constant.item()
        if func is _LIFT_FRESH and type(args[0]) is Tensor and self.may_turn_const(args[0]):
            return self._constant(args[0])
        if kwargs and (device := kwargs.get("device")) is not None and device.type == "cuda":
            # Code of a library below ``handle_torch_function``, where no function mode sees it.
            kwargs = kwargs | {"device": redirected(device)}
        if func is _TO_COPY and _goes_to_the_card(args, kwargs):
            args = (self.fake_tensor_converter.from_real_tensor(self, args[0]), *args[1:])
        if any(map(is_subclass_of_tensor, types)) and torch.Tag.inplace_view not in func.tags:
            return self._without_subclasses(func, types, args, kwargs)
        if torch.is_inference_mode_enabled() and _views_ordinary_tensor(func, args):
            with outside_inference_mode():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if asks_data(func):
            with self:
                answered = answer_operator(func, args, kwargs or {}, self.assumptions)
            if answered is not NOT_HANDLED:
                return answered
        if _is_foreach_in_place(func) and _all_unknown(args[0]):
            return None
        kwargs = kwargs or {}
        tensors: list[FakeTensor] = []
        key = call_key(func, args, kwargs, tensors)
        if key is None:
            args, kwargs = tree_map(self._in_place_of_real, (args, kwargs))
            tensors = []
            key = call_key(func, args, kwargs, tensors)
        if key is None:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(out, Tensor) and is_lazy(out):
                lazy_operators.add(func)
            return out
        known = _calls.get(key)
        if known is not None:
            with DisableTorchDispatch():
                return known.make(self, tensors)
        out = self._run(func, types, args, kwargs, tensors)
        layout = layout_of(func, args, on_cpu=not self.on_gpu)
        if layout is not None:
            out = laid_out(out, layout, self.new)
        if self.on_gpu and any(tensor.fake_device.type == NAME for tensor in tensors):
            out = cuda_outputs(func, args, out)
        make = self._learn(func, tensors, out)
        if make is not None:
            _calls[key] = Remembered(make=make)
        return out

    def _without_subclasses(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A call on plain fake tensors: the functions for shapes call methods of tensors, which a kernel does not."""
        own: dict[int, Any] = {}

        def plain(value: Any) -> Any:
            if not is_subclass_of_tensor(type(value)):
                return value
            with DisableTorchDispatch(), DisableTorchFunction():
                elem = torch.empty_strided((0,), (1,), dtype=value.dtype, device=_META)
                elem.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
                alias = self.view(elem, value.fake_device)
            alias.constant = value.constant
            own[id(alias)] = (alias, value)
            return alias

        args, kwargs = tree_map(plain, (args, kwargs or {}))
        types = tuple(FakeTensor if is_subclass_of_tensor(kind) else kind for kind in types)
        out = self.__torch_dispatch__(func, types, args, kwargs)
        return tree_map(lambda value: own[id(value)][1] if id(value) in own else value, out)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        """The outputs of a call that nothing is remembered of."""
        if func in _CLASSES_AT:
            args = self._with_wide_classes(args, _CLASSES_AT[func])
            tensors = [value for value in args if isinstance(value, FakeTensor)]
        with self:
            product = grouped_products.run(func, args, kwargs)
        if product is not NOT_HANDLED:
            return product
        result = norm_shapes.run(func, args, tensors) if not kwargs else NOT_HANDLED
        if result is NOT_HANDLED:
            result = meta_kernels.run(func, args, kwargs, tensors)
        if result is NOT_HANDLED:
            result = self._by_its_own_shapes(func, types, args, kwargs)
            if _is_of_a_library(func):
                return result
        else:
            device = meta_kernels.device_of(func, kwargs, tensors)
            result = tree_map(lambda value: self.new(value, device) if type(value) is Tensor else value, result)
        if func in _LOSSES_OF_FULL_SIZE and result.dim() == 0:
            return self._within(torch.broadcast_shapes(args[0].shape, args[1].shape), result)
        if func in _MADE_LIKE_INPUT and result.numel() < args[0].numel():
            return self._within(args[0].shape, result)
        return result

    def _by_its_own_shapes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The outputs of an operator whose shapes come from torch's code, or a library's.

        One of a library that is composed of others decomposes with torch functions off: with them on, torch would
        dispatch it anew as itself, without end.

        Raises:
            InputError: that code asks what its inputs hold.
        """
        is_of_library = _is_of_a_library(func)
        try:
            if not is_of_library or not self.on_gpu or has_kernel(func.name(), _COMPOSITE):
                return fake_outputs(self, func, types, args, kwargs)
            with EnableTorchFunction(), SaysCuda():
                return fake_outputs(self, func, types, args, kwargs)
        except DynamicOutputShapeException:
            why = "the shapes of its outputs depend on what its inputs hold, which a prediction does not know"
            write = "use one whose outputs do not"
            if is_of_library:
                write += " (bitsandbytes: 4-bit weights, or threshold=0 with 8-bit ones)"
            raise InputError(f"operator {func} at {source_line()[0]}", why, write) from None

    def _with_wide_classes(self, args: Any, position: int) -> Any:
        """The arguments of a loss over classes, whose kernels take uint8 and whose function for shapes does not."""
        classes = args[position]
        if classes.dtype is not torch.uint8:
            return args
        with DisableTorchDispatch():
            wide = torch.empty(classes.shape, dtype=torch.int64, device=_META)
        return (*args[:position], self.new(wide, classes.fake_device), *args[position + 1 :])

    def _within(self, shape: torch.Size, result: FakeTensor) -> FakeTensor:
        """A result within a storage of more elements, those of ``shape``: they stay allocated as long as it does."""
        with DisableTorchDispatch():
            storage = torch.empty(shape, dtype=result.dtype, device=_META)
            return self.new(storage.as_strided(result.shape, result.stride()), result.fake_device)

    def remembered(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Remembered | None]:
        """What an operator gives that was run before, without another dispatch; else NOT_HANDLED.

        Not for one that asks data: its answer is none to be remembered.
        """
        tensors: list[FakeTensor] = []
        key = call_key(func, args, kwargs, tensors)
        known = _calls.get(key) if key is not None else None
        if known is None:
            return NOT_HANDLED, None
        with DisableTorchDispatch():
            return known.make(self, tensors), known

    def _constant(self, real: Tensor) -> FakeTensor:
        """A fake tensor that knows its content: what ``torch.tensor`` was given. Views of that are views of it."""
        with DisableTorchDispatch():
            elem = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
            out = self.new(elem, real.device)
            out.constant = real.clone()
        converter = self.fake_tensor_converter
        converter.add_constant_storage_mapping(out)
        metas = converter.meta_converter
        content = metas.describer.get_storage_id(out.constant.untyped_storage())
        metas.storage_memo[content] = elem.untyped_storage()
        return out

    def fake_like(self, real: Tensor) -> FakeTensor:
        """A fake tensor of a real one's shape, strides, type and device."""
        with DisableTorchDispatch():
            elem = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
            return self.new(elem, real.device)

    def _in_place_of_real(self, value: Any) -> Any:
        """What an operator takes for an argument: a fake tensor for a real one of plain strides."""
        is_real = isinstance(value, Tensor) and is_plain_class(type(value)) and value.layout is torch.strided
        return self.fake_like(value) if is_real else value

    def new(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor on ``device`` over a meta tensor; what ``FakeTensor(mode, elem, device)`` gives, faster."""
        tensor = self.view(elem, device)
        warn_on_data_pointer(tensor)
        return tensor

    def view(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """``new`` over the storage of another fake tensor, which warns already where its address is asked for. ``elem``
        may be that tensor, where dispatch is off."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self, torch.empty(0, device=_META), device)
            self._attributes[device] = attributes = dict(vars(first))
        tensor: FakeTensor = make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        tensor.__dict__.update(attributes)
        return tensor

    def _learn(self, func: Any, tensors: list[FakeTensor], out: Any) -> Make | None:
        if not isinstance(func, OpOverload) or _is_of_a_library(func):
            return None
        if func in _NOT_LEARNT or (_UNLEARNABLE_TAGS & set(func.tags) and func is not _aten.index.Tensor):
            return None
        places = _places(tensors)
        if isinstance(out, (tuple, list)):
            makes = [self._learn_one(func, tensors, places, tensor) for tensor in out]
            if None in makes:
                return None
            kind = list if isinstance(out, list) else tuple
            return lambda mode, given: kind([make(mode, given) for make in makes])  # type: ignore[misc]
        return self._learn_one(func, tensors, places, out)

    def _learn_one(
        self, func: Any, tensors: list[FakeTensor], places: dict[int, int], out: Any
    ) -> Make | None:  # fmt: skip
        if out is None or type(out) in (int, bool):
            return lambda mode, given: out
        if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
            return None
        if id(out) in places:
            place = places[id(out)]
            return lambda mode, given: given[place]
        if is_lazy(out):
            lazy_operators.add(func)
            return None
        if out.requires_grad or out.is_inference():
            return None
        storage = out.untyped_storage()
        shape, stride, offset, dtype, device = (
            tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.fake_device,
        )  # fmt: skip
        if storage_id(storage) in places:
            place = places[storage_id(storage)]
            seen = tensors[place]
            if (seen.shape, seen.stride(), seen.storage_offset(), seen.dtype) == (shape, stride, offset, dtype):
                return lambda mode, given: mode.view(given[place], device)
            return _view_maker(place, shape, stride, offset, dtype, device)
        fresh = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        if offset or fresh.untyped_storage().nbytes() != storage.nbytes():
            return None
        return lambda mode, given: mode.new(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)


def _view_maker(place: int, shape: Any, stride: Any, offset: Any, dtype: torch.dtype, device: torch.device) -> Make:
    def make(mode: VirtualMode, given: list[FakeTensor]) -> FakeTensor:
        elem = torch.empty_strided((0,), (1,), dtype=dtype, device=_META)
        elem.set_(given[place].untyped_storage(), offset, shape, stride)
        return mode.view(elem, device)

    return make
