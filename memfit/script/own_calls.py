"""Modules whose class has a ``__call__`` of its own, as gpytorch's have: torch's hooks see none of their forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from memfit.device.virtual.patching import replaced
from memfit.script.step_watch import StepWatch


@contextmanager
def own_calls(watch: StepWatch) -> Iterator[None]:
    """Context in which calls of such modules are noted as forwards, from when a module is given its first parameter or
    submodule. A ``__call__`` that goes on to another class's is left as it is: the last of them is noted."""
    with ExitStack() as stack:

        def followed(module: nn.Module, *rest: Any) -> None:
            if type(module).__call__ is nn.Module.__call__:
                return
            for kind in type(module).__mro__:
                call = vars(kind).get("__call__")
                code = getattr(call, "__code__", None)
                if code is None or kind is nn.Module or kind.__module__.startswith("torch."):
                    continue
                if "__call__" not in code.co_names and code is not _CODE:
                    stack.enter_context(replaced(kind, __call__=_noted(watch, call)))

        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            stack.callback(register(followed).remove)
        yield


def _noted(watch: Any, call: Any) -> Any:
    @wraps(call)
    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or watch.tracer.is_quiet:
            return call(self, *args, **kwargs)
        watch.enter_module(self)
        try:
            return call(self, *args, **kwargs)
        finally:
            watch.leave_module(self)

    return noted


_CODE = _noted(None, None).__code__
"""The code of each function that notes a call."""
