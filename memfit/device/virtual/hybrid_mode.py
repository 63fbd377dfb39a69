"""Real on the host, fake on the card: the mode for a script that does more than a training step.

Samplers, tokenisers, numpy and collate functions need real tensors. So only tensors on the card are fake, parameters
(a net then takes no host memory), and what is computed from either. An operator on real CPU tensors runs as it is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from memfit.device.virtual.assumptions import ASSUMED, ASSUMED_NUMBER, assumed_integer, assumed_number
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.data_dependent import PUTS, answer_operator
from memfit.device.virtual.fake_mode import VirtualMode
from memfit.device.virtual.patching import appended, replaced
from memfit.device.virtual.replaced_data import DATA, set_data
from memfit.device.virtual.unknown_content import any_unknown, follow_unknown, is_unknown, note_writes
from memfit.device.virtual.value_masks import most_true, note_most
from memfit.torch_compat import DisableTorchDispatch, FakeTensor, is_traceable_wrapper_subclass_type
from memfit.torch_compat.attributes import schema_of, storage_id_of

MOST_STAND_IN_BYTES = 256 << 20
"""The most bytes of real tensors that stand for what came back from the card, in sum; past it they stay fake."""

_TOUCHED = 1 << 16
"""Bytes of floating point numbers up to which a stand-in is filled; of a larger one the system makes no page before it
is written to."""

_WRITTEN = 1 << 20
"""Bytes of floating point numbers up to which assumed numbers are written to a real tensor, whose memory is there."""

_aten = torch.ops.aten
_TO_COPY = _aten._to_copy.default
_LEFT_ALIGNED = _aten._nested_tensor_from_mask_left_aligned.default
_SELECTS = frozenset({_aten.index.Tensor, _aten.masked_select.default, _aten.nonzero.default})
"""Operators whose outputs have as many rows as a mask selects."""
_BY_MASKS = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor, *PUTS})
"""Operators whose second argument may hold masks."""
_SIZED_BY = {
    _aten.masked_select.default: 1, _aten.nonzero.default: 0, _aten._unique2.default: 0, _aten.unique_dim.default: 0,
    _aten.unique_consecutive.default: 0, _aten.unique_dim_consecutive.default: 0,
}  # fmt: skip
"""Operators whose outputs are as large as the content of an argument says, and which argument that is."""
_CONJUNCTIONS = frozenset({_aten.bitwise_and.Tensor, _aten.logical_and.default})
_COUNTED = frozenset(
    {_aten._local_scalar_dense.default, _aten.bincount.default, _aten.repeat_interleave.Tensor}
)  # fmt: skip
"""Operators that read integers which may be a size."""
_PLAIN = {Tensor, nn.Parameter}


def has_fake(values: Any) -> bool:
    """Whether a fake tensor is among these arguments, or in a list among them."""
    for value in values:
        if isinstance(value, FakeTensor):
            return True
        if (type(value) is list or type(value) is tuple) and has_fake(value):
            return True
    return False


def is_on_card(kwargs: dict[str, Any]) -> bool:
    """Whether ``device=`` names the card."""
    device = kwargs.get("device")
    return device is not None and _is_card(device)


def _is_on_host(kwargs: dict[str, Any]) -> bool:
    """Whether ``device=`` names the host. Forward-mode autograd asks for shapes with copies to the meta device."""
    device = kwargs.get("device")
    return device is not None and device.type != "meta" and not _is_card(device)


def _is_card(device: Any) -> bool:
    return torch.device(device).type in (NAME, "cuda")


def is_real_call(types: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator has to do with real CPU tensors alone."""
    if kwargs and (is_on_card(kwargs) or has_fake(kwargs.values())):
        return False
    if any(kind not in _PLAIN and is_traceable_wrapper_subclass_type(kind) for kind in types):
        return False
    if any(type(value) is torch.device and _is_card(value) for value in args):  # Tensor.to in inference mode
        return False
    return not has_fake(args)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.device.type == "cpu"


def _is_unknown_mask(index: Any) -> bool:
    return _is_real(index) and index.dtype in (torch.bool, torch.uint8) and is_unknown(index)


@cache
def _targets(func: Any) -> tuple[str, ...]:
    """The arguments that an operator writes its outputs into (``out=``), in the order of the outputs."""
    arguments = schema_of(func).arguments
    writes = [a for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
    return tuple(argument.name for argument in writes)


def _written(targets: list[Any], out: Any) -> Any:
    """The outputs of a call, real where the tensor that they are written into is and has their shape: it keeps its
    content. An operator that gives nothing, as FSDP2's ``chunk_cat``, leaves its content too."""
    if out is None:
        return None
    outs = out if isinstance(out, tuple | list) else (out,)
    pairs = zip(targets, outs, strict=True)
    kept = [target if _is_real(target) and target.shape == made.shape else made for target, made in pairs]
    return kept[0] if isinstance(out, Tensor) else type(out)(kept)


Content = Callable[[FakeTensor], Tensor | None]
"""The known content of a fake tensor, or None."""


class HybridMode(VirtualMode):
    """See the module. ``content`` gives what is known of a fake tensor that comes back from the card."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__(on_gpu=on_gpu)
        self.content: Content = lambda tensor: None
        self._stand_in_bytes = 0
        self._inside = 0
        """Operators on fake tensors that are being answered, one within another."""
        self._pinned: set[int] = set()
        self._assumed: set[int] = set()
        """Storages of stand-ins whose content was assumed, and of masks made of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside and is_real_call(types, args, kwargs):
            return self.run_real(func, args, kwargs)
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if func is _TO_COPY:
            if not isinstance(args[0], FakeTensor):
                args = (self.fake_like(args[0]), *args[1:])
            elif args[0].fake_device.type == NAME and _is_on_host(kwargs):
                return self.stand_in(args[0], kwargs.get("dtype"), lambda: self._fake(func, types, args, kwargs))
        elif schema_of(func).name.endswith("_") and _is_real(args[0]):
            if func is _aten.copy_.default and self._write(args[0], args[1]):
                return args[0]
            if not self.on_gpu:
                note_writes(func, args, kwargs)
            return args[0]  # of what else is written to a real tensor, nothing is known: it keeps its content
        out = self._fake(func, types, args, kwargs)
        if not self.on_gpu:
            note_writes(func, args, kwargs)
            if func in _CONJUNCTIONS:
                self._note_most(args, out)
        targets = [kwargs[name] for name in _targets(func) if name in kwargs] if kwargs else []
        return _written(targets, out) if any(map(_is_real, targets)) else out

    def _note_most(self, masks: Any, out: Tensor) -> None:
        """Notes of a mask that is true only where others are how many of its elements can be: as many as theirs."""
        with DisableTorchDispatch():
            for mask in masks:
                if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != out.shape:
                    continue
                if isinstance(mask, FakeTensor):
                    note_most(out, most_true(mask))
                elif _is_real(mask) and not is_unknown(mask):
                    note_most(out, int(mask.sum()))

    def _write(self, real: Tensor, fake: FakeTensor) -> bool:
        """Copies a fake tensor's known content to a real tensor, or the assumed number to floating point numbers that
        are not many. Whether the content is known."""
        known = self.content(fake)
        with DisableTorchDispatch():
            if known is not None:
                real.copy_(known)
                follow_unknown(_aten.copy_.default, (real, known), {}, real)
            elif real.is_floating_point() and real.numel() * real.itemsize <= _WRITTEN:
                real.fill_(assumed_number(fake) if fake.is_floating_point() else ASSUMED_NUMBER)
        return known is not None

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What an operator on fake tensors gives; what torch's decomposition of it makes is fake, too."""
        self._inside += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside -= 1

    def run_real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator on real tensors. Memory is never pinned, but says that it is.

        nn.TransformerEncoder makes no nested tensor of a batch on the host, since its weights are fake.
        """
        if func is _LEFT_ALIGNED:
            return answer_operator(func, [self.fake_like(tensor) for tensor in args], kwargs, self.assumptions)
        with DisableTorchDispatch():
            if func is _aten._pin_memory.default:
                self._pinned.add(args[0].data_ptr())
                return args[0]
            if func is _aten.is_pinned.default:
                return args[0].data_ptr() in self._pinned
            if kwargs.get("pin_memory"):
                out = func(*args, **(kwargs | {"pin_memory": False}))
                self._pinned.add(out.data_ptr())
                return out
            if self._assumed and func in _SELECTS:
                args = self._with_full_masks(args)
            out = func(*args, **kwargs)
            if self._assumed and func is _TO_COPY and out.dtype is torch.bool and self._is_assumed(args[0]):
                self._assume(out)
            return out if self.on_gpu else self._followed(func, args, kwargs, out)

    def _followed(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """What an operator on real tensors gave, where the content of one may not be known: a mask of several truth
        values is fake from then on, and is answered as on a card; numbers stay real."""
        if not any_unknown(args) and not any_unknown(kwargs.values()):
            return out
        follow_unknown(func, args, kwargs, out)
        if func in _COUNTED:
            self._note_count(func, out)
        if isinstance(out, tuple | list):
            return type(out)([self._fake_mask(args, made) for made in out])
        mask = self._fake_mask(args, out)
        if mask is not out and func in _CONJUNCTIONS:
            self._note_most(args, mask)
        return mask

    def _fake_mask(self, args: Any, made: Any) -> Any:
        """A fake tensor for a mask that an operator made of something unknown; a view stays real."""
        if not isinstance(made, Tensor) or made.dtype is not torch.bool or made.numel() < 2 or not is_unknown(made):
            return made
        key = storage_id_of(made)
        return made if any(type(a) is Tensor and storage_id_of(a) == key for a in args) else self.fake_like(made)

    def _note_count(self, func: Any, out: Any) -> None:
        """Notes an integer that was read from what is unknown: it may be a size."""
        count = out.shape[0] if isinstance(out, Tensor) else out
        if type(count) is int:
            name = "item" if func is _aten._local_scalar_dense.default else schema_of(func).name.removeprefix("aten::")
            self.assumptions.note(name, str(count), doubtful=True)

    def with_unknown(self, func: Any, args: Any) -> Any:
        """The arguments of an operator with a fake tensor in place of each real one whose content would say how large
        the outputs are, and is not known."""
        if self.on_gpu:
            return args
        if func in _BY_MASKS:
            indices = args[1]
            fake = [self.fake_like(i) if _is_unknown_mask(i) else i for i in indices]
            is_same = all(a is b for a, b in zip(indices, fake, strict=True))
            return args if is_same else (args[0], fake, *args[2:])
        at = _SIZED_BY.get(func)
        if at is None or not _is_real(args[at]) or not is_unknown(args[at]):
            return args
        return (*args[:at], self.fake_like(args[at]), *args[at + 1 :])

    def _with_full_masks(self, args: Any) -> list[Any]:
        """The arguments of a selection by masks. One whose content was assumed selects everything, as on the card: so
        the rows that a script cuts at their ends, by a mask that it has read, keep their largest length."""
        given = [list(argument) if isinstance(argument, list | tuple) else argument for argument in args]
        for values in (given, *(value for value in given if isinstance(value, list))):
            for place, value in enumerate(values):
                if isinstance(value, Tensor) and value.dtype is torch.bool and self._is_assumed(value):
                    values[place] = torch.ones_like(value)
        return given

    def _is_assumed(self, tensor: Tensor) -> bool:
        return storage_id_of(tensor) in self._assumed

    def _assume(self, made: Tensor) -> None:
        """Notes a tensor whose content was assumed."""
        key = storage_id_of(made)
        self._assumed.add(key)
        weakref.finalize(made.untyped_storage(), self._assumed.discard, key)

    def stand_in(self, fake: FakeTensor, dtype: torch.dtype | None, otherwise: Callable[[], Any]) -> Any:
        """A real CPU tensor for what comes back from the card: its known content, else what ``_assumed_content`` gives.

        Where there are too many already, it stays fake (``otherwise``).
        """
        dtype = dtype or fake.dtype
        known = self.content(fake)
        nbytes = fake.numel() * dtype.itemsize
        if known is None and self._stand_in_bytes + nbytes > MOST_STAND_IN_BYTES:
            return otherwise()
        with DisableTorchDispatch():
            if known is not None:
                return known.detach().to(dtype, copy=True)
            made = _assumed_content(fake, dtype)
            self._assume(made)
        self._stand_in_bytes += nbytes
        weakref.finalize(made.untyped_storage(), self._forget, nbytes)
        return made

    def _forget(self, nbytes: int) -> None:
        self._stand_in_bytes -= nbytes


def _assumed_content(fake: FakeTensor, dtype: torch.dtype) -> Tensor:
    """Numbers are 0.5 or a lower bound that code gave, or 0 where they are many. Integers and truth values are 0 and 1
    in turn, or what a trace follows of them: some of the classes, tokens and masks that are compared with them hit, and
    not all do, so that a metric is neither 0 nor perfect, and a loop does not wait for what none or every one has."""
    shape = tuple(fake.shape)
    if dtype.is_floating_point or dtype.is_complex:
        if fake.numel() * dtype.itemsize <= _TOUCHED:
            number = assumed_number(fake) if fake.is_floating_point() else ASSUMED_NUMBER
            return torch.full(shape, number, dtype=dtype)
        pages = torch.from_numpy(numpy.zeros(fake.numel() * dtype.itemsize, numpy.uint8))
        return pages.view(dtype).view(shape)
    least = 0 if dtype is torch.bool else assumed_integer(fake)
    made = torch.full(shape, least, dtype=dtype)
    if ASSUMED not in fake.__dict__:
        made.view(-1)[1::2] = least + 1
    return made


_keeps_real: list[bool] = []


@contextlib.contextmanager
def real_parameters() -> Iterator[None]:
    """A context in which ``nn.Parameter`` of a real CPU tensor has its storage, within ``fake_parameters`` too."""
    with appended(_keeps_real, True):
        yield


@contextlib.contextmanager
def fake_parameters(
    mode: HybridMode, made: Callable[[FakeTensor, Tensor], None] = lambda tensor, real: None
) -> Iterator[None]:
    """A context in which ``nn.Parameter`` of a real CPU tensor is fake, and stays so where the script sets its
    ``data`` to another: a net costs host memory for one tensor at a time. On the virtual CPU, a real tensor whose
    ``data`` the script sets to a fake one becomes fake; the virtual GPU sees to it by itself.

    Args:
        made: called with what stands for the parameter's storage, and with the real tensor that has it.
    """
    make: Any = nn.Parameter.__new__

    def set_fake_data(tensor: Any, data: Any) -> None:
        on_cpu = isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cpu"
        if on_cpu and type(data) in _PLAIN and data.device.type == "cpu":
            real, data = data, mode.fake_like(data)
            made(data, real)
        (DATA.__set__ if mode.on_gpu else set_data)(tensor, data)

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if not _keeps_real and type(data) in _PLAIN and data.device.type == "cpu":
            real, data = data, mode.fake_like(data)
            made(data, real)
        return make(cls, data, requires_grad)

    with (
        replaced(nn.Parameter, __new__=staticmethod(new)),
        replaced(FakeTensor if mode.on_gpu else Tensor, data=property(DATA.__get__, set_fake_data)),
    ):
        yield
