"""PrivateUse1 as a device without kernels: a name, a module of answers, and a device guard for autograd's engine.

From torch 2.10 on, ``torch.utils.backend_registration`` does it from Python; before, ``memfit.torch_compat.guard``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.graph as graph_module

from memfit.installation import release_number
from memfit.torch_compat.guard import register_before_2_10
from memfit.torch_compat.versions import lacks

NAME = "vgpu"
"""The name of PrivateUse1 once it is registered."""

run_backward: Any = graph_module._engine_run_backward
"""Autograd's engine, as ``Tensor.backward`` and ``torch.autograd.grad`` call it."""

_left: list[BaseException] = []
"""What a hook has raised in a backward and left with autograd's thread."""


def register_backend(module: Any, is_available: Callable[[], bool]) -> None:
    """Names PrivateUse1. It can be done once in a process, and not be undone.

    Args:
        module: what ``torch.vgpu`` is.
        is_available: whether code may use the device now.

    Raises:
        InputError: this torch lets no device be registered from Python.
    """
    if release_number(torch.__version__) >= (2, 10):
        _register_in_python(module, is_available)
    else:
        register_before_2_10(NAME, module, is_available)
    if release_number(torch.__version__) < (2, 7):  # it counts the devices of the guard; later versions ask the module
        torch.accelerator.is_available = is_available


def _register_in_python(module: Any, is_available: Callable[[], bool]) -> None:
    try:
        from torch.utils.backend_registration import _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

        class VirtualDeviceGuard(torch._C._acc.DeviceGuard):
            def type_(self) -> Any:
                return _device_type()

        class Hook(_DummyPrivateUse1Hook):
            def is_available(self) -> bool:
                return is_available()

    except (ImportError, AttributeError) as error:
        raise lacks(error) from error
    _setup_privateuseone_for_python_backend(NAME, backend_module=module, hook=Hook(), device_guard=VirtualDeviceGuard())


_raise_pending = ctypes.PyDLL(None).PyErr_Occurred
"""Raises the exception that this thread was left with."""


def _device_type() -> Any:
    """PrivateUse1. torch asks it of the device while a hook's exception leaves a backward, too: that exception is
    pending in the thread then, and a call that ends with one pending would end the process (``PythonDeviceGuard``)."""
    try:
        _raise_pending()
    except BaseException as error:
        _left[:] = [error]
    return torch._C._autograd.DeviceType.PrivateUse1


def run_backward_on_device(*args: Any, **kwargs: Any) -> Any:
    """torch's own, which says SystemError for an exception that was taken from its thread."""
    _left.clear()
    try:
        return run_backward(*args, **kwargs)
    except SystemError as error:
        raise (_left.pop() if _left else error) from None


@contextlib.contextmanager
def engine_replaced(function: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``function`` is called for a backward in place of autograd's engine."""
    before = torch.autograd._engine_run_backward
    torch.autograd._engine_run_backward = function
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = before


def current_engine() -> Any:
    """What a backward calls now."""
    return torch.autograd._engine_run_backward
