"""Tensors that hold others (torchao's quantized ones, by ``_make_wrapper_subclass``) on the virtual GPU.

Such a class has no storage of its own: it says what an operator does with the tensors that it holds, which are fake.
That code runs within torch's, where ``SaysCuda`` is off, and it asks for the card by the name that it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from memfit.device.virtual.patching import replaced
from memfit.device.virtual.redirect import SaysCuda, redirected
from memfit.torch_compat.attributes import MAKE_WRAPPER_SUBCLASS, make_wrapper_subclass

_HANDLERS = ("__torch_function__", "__torch_dispatch__")


def _saying_cuda(handle: Callable[..., Any]) -> classmethod[Any, Any, Any]:
    """A class's handler of functions or operators, whose own code says cuda."""

    @wraps(handle)
    def call(kind: type[Tensor], *args: Any, **kwargs: Any) -> Any:
        with SaysCuda():
            return handle(*args, **kwargs)

    return classmethod(call)


def _own_handlers(kind: type[Tensor]) -> dict[str, Any]:
    """The handlers of a class that are written in Python outside of torch, each saying cuda."""
    handlers = {name: getattr(kind, name, None) for name in _HANDLERS}
    modules = {name: getattr(handler, "__module__", None) or "torch" for name, handler in handlers.items()}
    return {
        name: _saying_cuda(handler)
        for name, handler in handlers.items()
        if handler is not None and modules[name].partition(".")[0] != "torch"
    }


@contextmanager
def wrappers_on_the_card() -> Iterator[None]:
    """A context in which a wrapper that says cuda is on the virtual GPU, and its class's code says cuda."""
    known: set[type[Tensor]] = set()
    with ExitStack() as stack:

        def make(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
            if kind not in known:
                known.add(kind)
                stack.enter_context(replaced(kind, **_own_handlers(kind)))
            if "device" in kwargs:
                kwargs["device"] = redirected(kwargs["device"])
            made: Tensor = make_wrapper_subclass(kind, *args, **kwargs)
            return made

        stack.enter_context(replaced(Tensor, **{MAKE_WRAPPER_SUBCLASS: staticmethod(make)}))
        yield
