"""Parameters of a class of their own (bitsandbytes' weights) that stay of that class when they are fake.

torch refuses to make a class of a tensor that is of another class, as every fake tensor is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from memfit.device.virtual.patching import replaced
from memfit.torch_compat import FakeTensor
from memfit.torch_compat.attributes import MAKE_SUBCLASS, make_subclass


@cache
def _fake_class(kind: type[Tensor]) -> type[FakeTensor]:
    """The class's fake, under the same name, since libraries ask for it.

    ``nn.Module.to`` makes a parameter of what ``to`` gave, which needs a ``detach`` to the same class and attributes.
    """

    if issubclass(kind, FakeTensor):
        return kind

    def detach(self: FakeTensor) -> Tensor:
        made = Tensor.detach(self)
        made.__class__ = type(self)
        made.__dict__.update({name: value for name, value in vars(self).items() if name not in vars(made)})
        return made

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "detach": detach}
    return type(kind.__name__, (kind, FakeTensor), names)


@contextmanager
def parameter_classes_kept() -> Iterator[None]:
    """A context in which a subclass of Parameter that is made of a fake tensor has the subclass's methods."""

    def make_known_subclass(kind: type[Tensor], data: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (isinstance(data, FakeTensor) and issubclass(kind, nn.Parameter)):
            return make_subclass(kind, data, *args, **kwargs)
        made = Tensor.detach(data).requires_grad_(bool(args[0] if args else kwargs.get("require_grad", False)))
        made.__class__ = _fake_class(kind)
        return made

    with replaced(Tensor, **{MAKE_SUBCLASS: staticmethod(make_known_subclass)}):
        yield
