"""Stand-ins for packages that are not installed and do not affect the memory of a step."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from memfit.script.triton_stand_in import ATTRIBUTES


class Anything(type):
    """A class whose attributes, calls and items are again such classes: ``InterpolationMode.NEAREST_EXACT`` and
    ``wandb.init(...).log(...)`` alike. It can be inherited from, iterated over (empty) and used as a context."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_is_stub"):
            if len(args) == 1 and callable(args[0]) and not kwargs:
                return args[0]  # used as a decorator
            return cls
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        return False

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *error: Any) -> None: ...


def _stub(name: str) -> Any:
    return Anything(name.rpartition(".")[2], (), {"_is_stub": True, "__module__": name})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        stub = importlib.import_module(full) if full in ATTRIBUTES else _stub(full)
        setattr(self, name, stub)
        return stub


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = set(packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not any(fullname == package or fullname.startswith(package + ".") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(ATTRIBUTES.get(module.__name__, {}))


@contextmanager
def stubbed(packages: Sequence[str]) -> Iterator[None]:
    """Context in which these packages are imported as stand-ins."""
    finder = _Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
