"""Classes of tensors that stay what they are when their tensors are fake.

bitsandbytes' weights are such classes of parameters; MONAI's MetaTensor, torchvision's TVTensor and fastai's TensorBase
are tensors with methods and a ``__torch_function__``. torch makes a tensor of such a class by ``as_subclass`` or
``_make_subclass``: of a fake tensor, it would make one that is no longer fake.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from memfit.device.virtual.patching import replaced
from memfit.torch_compat import DisableTorchFunction, FakeTensor
from memfit.torch_compat.attributes import MAKE_SUBCLASS, make_subclass

FAKE_CLASSES: dict[type[Tensor], type[Tensor]] = {FakeTensor: Tensor}
"""The class of each fake tensor -> the class that it stands for."""


@cache
def is_plain_class(kind: type[Tensor]) -> bool:
    """Whether operators on tensors of this class are torch's own: it is Tensor, or adds methods and functions alone."""
    return getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__


_DICT: Any = vars(Tensor)["__dict__"]
_TORCH_FUNCTION: Any = vars(Tensor)["__torch_function__"].__func__
_own_names: set[str] = set()
"""Names of the attributes that make a tensor fake."""


class _Subclass(FakeTensor):
    """What a fake tensor has that stands for a subclass of Tensor: torch functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As Tensor has it. A class with dispatch of its own has none otherwise, FakeTensor among them."""
        return _TORCH_FUNCTION(cls, func, types, args, kwargs)


class _Attributes(dict[str, Any]):
    """The attributes of a fake tensor. Code that copies them to another one does not see those that make it fake."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if not _is_own(name))

    def keys(self) -> Any:
        return list(self)

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def own(self) -> dict[str, Any]:
        """What makes the tensor fake, and what a trace knows of it."""
        return {name: value for name, value in super().items() if _is_own(name)}


def _is_own(name: str) -> bool:
    return name in _own_names or name.startswith("_memfit")


def _set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    """Libraries set the attributes of a result to those of an argument; the result stays fake as it is."""
    given = {name: value for name, value in attributes.items() if not _is_own(name)}
    _DICT.__set__(tensor, _Attributes(given | _DICT.__get__(tensor).own()))


@cache
def _fake_class(kind: type[Tensor]) -> type[FakeTensor]:
    """The class's fake, under the same name, since libraries ask for it."""
    if issubclass(kind, FakeTensor):
        return kind
    if kind is Tensor:
        return FakeTensor
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if issubclass(kind, nn.Parameter):
        made: type[FakeTensor] = type(kind.__name__, (kind, FakeTensor), names | {"detach": _detached_parameter})
    else:
        names["__dict__"] = property(_DICT.__get__, _set_attributes)
        made = type(kind.__name__, (kind, _Subclass), names)
    FAKE_CLASSES[made] = kind
    return made


def _detached_parameter(self: FakeTensor) -> Tensor:
    """``nn.Module.to`` makes a parameter of what ``to`` gave, which needs a ``detach`` to its class and attributes."""
    made = Tensor.detach(self)
    made.__class__ = type(self)
    made.__dict__.update({name: value for name, value in vars(self).items() if name not in vars(made)})
    return made


def _of_class(made: Tensor, kind: type[Tensor]) -> Tensor:
    """A new fake tensor, made one that stands for another class."""
    fake_class = _fake_class(kind)
    if issubclass(fake_class, _Subclass):
        _own_names.update(vars(made))
        _DICT.__set__(made, _Attributes(vars(made)))
    made.__class__ = fake_class
    return made


def is_subclass_of_tensor(kind: type[Tensor]) -> bool:
    """Whether fake tensors of this class have methods of their own, which torch's kernels do not call."""
    return issubclass(kind, _Subclass)


@contextmanager
def tensor_classes_kept() -> Iterator[None]:
    """A context in which a subclass of Tensor that is made of a fake tensor is fake, and has the subclass's methods."""
    plain_as_subclass = Tensor.as_subclass

    def make_known_subclass(kind: type[Tensor], data: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(data, FakeTensor) or issubclass(kind, FakeTensor) or not is_plain_class(kind):
            return make_subclass(kind, data, *args, **kwargs)
        with DisableTorchFunction():
            made = Tensor.detach(data).requires_grad_(bool(args[0] if args else kwargs.get("require_grad", False)))
        return _of_class(made, kind)

    def as_subclass(tensor: Tensor, kind: type[Tensor]) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return plain_as_subclass(tensor, FAKE_CLASSES.get(kind, kind))
        if kind not in FAKE_CLASSES and not is_plain_class(kind):
            return plain_as_subclass(tensor, kind)
        with DisableTorchFunction():
            made: Tensor = torch.ops.aten.alias.default(tensor)
        return _of_class(made, kind)

    with replaced(Tensor, as_subclass=as_subclass, **{MAKE_SUBCLASS: staticmethod(make_known_subclass)}):
        yield
