"""Code that says cuda runs on the virtual GPU.

``x.device`` answers ``cuda:0`` to a user's or a library's code; torch's own code, and memfit's, sees the device's name.
nn.DataParallel has one card.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from inspect import CO_VARKEYWORDS
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.cuda_module import stubs
from memfit.device.virtual.default_tensor_type import LEGACY_DTYPES, default_tensor_types
from memfit.device.virtual.device_name import named_cuda, rename_in, seen_from
from memfit.device.virtual.patching import replaced
from memfit.device.virtual.replaced_data import DATA, set_data
from memfit.torch_compat import FakeTensor, Generator, default_device_context, forget_default_device, tree_map_only
from memfit.torch_compat.attributes import MODULE_APPLY, current_module_apply, fake_parameters_swapped, from_cpu_data
from memfit.torch_compat.backend import current_engine, engine_replaced
from memfit.torch_compat.tracing import without_newest_mode

_CUDA = re.compile(r"cuda(?::(\d+))?")

named_cards: set[int] = set()
"""Numbers of the cards that code has named, of which a trace has one."""


def redirected(value: Any) -> Any:
    """``"cuda"``, ``"cuda:1"`` and ``torch.device("cuda")`` become the virtual device; anything else stays."""
    if isinstance(value, str):
        card = _CUDA.fullmatch(value)
        if card is None:
            return value
        named_cards.add(int(card[1] or 0))
        return NAME
    if isinstance(value, torch.device) and value.type == "cuda":
        named_cards.add(value.index or 0)
        return torch.device(NAME)
    return value


def _to_gpu(tensor: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
    return tensor.to(NAME, non_blocking=non_blocking, memory_format=memory_format or torch.preserve_format)


def _device(tensor: FakeTensor) -> torch.device:
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    device = tensor.fake_device
    if device.type == NAME and seen_from(sys._getframe(1)):
        return torch.device("cuda", 0)
    return device


def _wrapper_device(tensor: Tensor, *owner: Any) -> torch.device:
    """``x.device`` of a tensor that is not fake: one that holds fake ones, on the card, is on cuda to a user's code."""
    device = tensor.device
    on_card = device.type == NAME and not isinstance(tensor, FakeTensor)
    return torch.device("cuda", 0) if on_card and seen_from(sys._getframe(2)) else device


def _type(tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """``x.type()``, and ``x.type(torch.cuda.HalfTensor)`` or ``x.type("torch.cuda.HalfTensor")``."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    if dtype is None:
        return tensor.type().replace(f"torch.{NAME}.", "torch.cuda.")
    if "cuda" in name:
        return tensor.to(NAME, LEGACY_DTYPES[name.rpartition(".")[2]])
    return tensor.type(dtype, non_blocking, **kwargs)


def _with_lengths_on_the_card(ctc_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Lengths on the host are numbers to CUDA's kernel; here they go where the rest is."""

    def call(log_probs: Tensor, *args: Any, **kwargs: Any) -> Any:
        given, named = tree_map_only(Tensor, lambda tensor: tensor.to(log_probs.device), (args, kwargs))
        return ctc_loss(log_probs, *given, **named)

    return call


def _from_data(make: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` and its like in any thread: a module that is recomputed runs in one of autograd's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = redirected(kwargs["device"])
        with from_cpu_data():
            return make(*args, **kwargs)

    return call


def _formatted(tensor: Tensor, spec: str) -> str:
    return tensor.item().__format__(spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


def _as_numpy(tensor: Tensor, *, force: bool = False) -> Any:
    import numpy

    if not isinstance(tensor, FakeTensor):
        return tensor.numpy(force=force)
    return numpy.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


INSTEAD: dict[Any, Callable[..., Any]] = {
    DATA.__set__: set_data,
    Tensor.cuda: _to_gpu,
    Tensor.device.__get__: _wrapper_device,
    Tensor.is_cuda.__get__: lambda tensor, *owner: tensor.device.type == NAME,  # type: ignore[attr-defined]
    Tensor.pin_memory: lambda tensor, device=None: tensor,
    Tensor.is_pinned: lambda tensor, device=None: False,
    Tensor.__format__: _formatted,
    Tensor.numpy: _as_numpy,
    Tensor.type: _type,
    **{make: _from_data(make) for make in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)},
    torch.ctc_loss: _with_lengths_on_the_card(torch.ctc_loss),
    nn.functional.ctc_loss: _with_lengths_on_the_card(nn.functional.ctc_loss),
}


class SaysCuda(TorchFunctionMode):
    """Rewrites the devices that any torch function is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        instead = INSTEAD.get(func)
        if instead is not None:
            return instead(*args, **kwargs)
        if "device" in kwargs:
            kwargs = kwargs | {"device": redirected(kwargs["device"])}
        for value in args:
            if type(value) is str or type(value) is torch.device:
                args = tuple(map(redirected, args))
                break
        func = _replacement(func, kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            rename_in(error)
            raise


def _replacement(func: Any, kwargs: Mapping[str, Any]) -> Any:
    """What stands under the name of a function of torch.nn.functional that does not know these arguments.

    Code that replaces one by its own (GPT-SoVITS: attention with a cache) hands torch's to ``handle_torch_function``,
    with arguments that only its own takes.
    """
    if not kwargs or not isinstance(func, FunctionType) or func.__module__ != nn.functional.__name__:
        return func
    code = func.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if code.co_flags & CO_VARKEYWORDS or kwargs.keys() <= set(known):
        return func
    return getattr(nn.functional, func.__name__, func)


def _says_cuda_inside(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose hooks and recomputing may make tensors: the mode is off inside of the function that it handles,
    which ``Tensor.backward`` is."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with SaysCuda():
            return run_backward(*args, **kwargs)

    return run


def _first_redirected(function: Callable[..., Any], when_absent: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """``function`` with its device type redirected."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device_type" in kwargs:
            kwargs["device_type"] = redirected(kwargs["device_type"])
        return function(*map(redirected, args or (() if kwargs else when_absent)), **kwargs)

    return call


def _autocast_init() -> Callable[..., None]:
    init, default_dtype = autocast.__init__, torch.get_autocast_dtype

    @wraps(init)
    def initialize(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        kind = redirected(device_type)
        if dtype is None and kind != device_type:
            dtype = default_dtype("cuda")
        init(self, kind, dtype, *args, **kwargs)

    return initialize


def _scaler_init() -> Callable[..., None]:
    init = GradScaler.__init__

    @wraps(init)
    def initialize(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        init(self, redirected(device), *args, **kwargs)

    return initialize


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _on_one_card(self: nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
    """nn.DataParallel where there is one card: the inputs go there."""
    named_cards.update(getattr(self, "device_ids", ()))
    inputs, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(NAME), (inputs, kwargs))
    return self.module(*inputs, **kwargs)


def _apply_in_module() -> Callable[..., nn.Module]:
    """Module._apply swaps parameters that are fake, which fails where a graph still holds one: what hooks (weight_norm)
    computed from it is taken off its graph first. It is computed anew before the next forward."""
    apply = current_module_apply()

    @wraps(apply)
    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        held = vars(self)
        for name in [name for name, value in held.items() if isinstance(value, FakeTensor) and not value.is_leaf]:
            held[name] = held[name].detach()
        with fake_parameters_swapped(self):
            return apply(self, *args, **kwargs)

    return _apply


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Generator)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return Generator("cpu")


@contextlib.contextmanager
def default_device_kept() -> Iterator[None]:
    """``torch.set_default_device`` inside does not last."""
    set_default, before = torch.set_default_device, default_device_context()
    try:
        yield
    finally:
        if default_device_context() is not before:
            set_default(None if before is None else before.device)
            forget_default_device()


@contextlib.contextmanager
def says_cuda(card: CardRules, emptied: Callable[[], None], note_memory: Callable[[str], None]) -> Iterator[None]:
    """Devices, autocast, GradScaler, generators and the queries of ``torch.cuda`` go to the virtual GPU.

    ``torch.save`` writes nothing. ``emptied`` and ``note_memory`` are as of
    ``memfit.device.virtual.cuda_module.stubs``.
    """
    legacy = {
        "get_autocast_gpu_dtype": lambda: torch.get_autocast_dtype(NAME),
        "set_autocast_gpu_dtype": lambda dtype: torch.set_autocast_dtype(NAME, dtype),
        "is_autocast_enabled": _first_redirected(torch.is_autocast_enabled, ("cuda",)),
        "set_autocast_enabled": _set_autocast_enabled(torch.set_autocast_enabled),
    }
    by_device = {name: _first_redirected(getattr(torch, name)) for name in ("get_autocast_dtype", "set_autocast_dtype")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(autocast, __init__=_autocast_init()))
        stack.enter_context(replaced(GradScaler, __init__=_scaler_init()))
        stack.enter_context(
            replaced(torch, Generator=_Generator, save=lambda *args, **kwargs: None, **legacy, **by_device)
        )
        stack.enter_context(replaced(FakeTensor, device=property(_device), record_stream=_nothing))
        stack.enter_context(replaced(nn.Module, **{MODULE_APPLY: _apply_in_module()}))
        stack.enter_context(replaced(nn.DataParallel, forward=_on_one_card))
        stack.enter_context(default_tensor_types())
        # nn.TransformerEncoderLayer and nn.MultiheadAttention ask it before they take their fused kernels
        asked = without_newest_mode(torch.overrides.has_torch_function)
        stack.enter_context(replaced(torch.overrides, has_torch_function=asked))
        for module, attributes in stubs(card, emptied, note_memory):
            stack.enter_context(replaced(module, **attributes))
        set_default = torch.set_default_device
        redirecting = {"set_default_device": lambda device: set_default(redirected(device))}
        stack.enter_context(replaced(torch, **redirecting))
        stack.enter_context(engine_replaced(_says_cuda_inside(current_engine())))
        stack.enter_context(named_cuda())
        stack.enter_context(SaysCuda())
        yield


def _set_autocast_enabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``set_autocast_enabled(True)`` means cuda."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(NAME, *args) if len(args) == 1 and not kwargs else function(*map(redirected, args), **kwargs)

    return call
