"""Replaces attributes of a library's modules as soon as a script imports them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from memfit.device.virtual.patching import replaced

Hook = Callable[[Any], tuple[Any, dict[str, Any]]]
"""Takes the imported module; returns the object to change and its new attributes."""


@contextmanager
def on_import(hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Context in which a module's hook, by dotted name, is applied when it is imported, or at once if it was."""
    with ExitStack() as stack:
        execute = SourceFileLoader.exec_module

        def apply(module: ModuleType) -> None:
            hook = hooks.get(module.__name__)
            if hook is not None:
                owner, attributes = hook(module)
                stack.enter_context(replaced(owner, **attributes))

        def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
            execute(loader, module)
            apply(module)

        for name in hooks.keys() & sys.modules.keys():
            apply(sys.modules[name])
        stack.enter_context(replaced(SourceFileLoader, exec_module=exec_module))
        yield
