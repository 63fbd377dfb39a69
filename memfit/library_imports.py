"""Imports of libraries whose time a prediction need not take: what they import at once and seldom use."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DEFERRED = frozenset({"scipy.stats"})
"""Modules that are run when something of them is first asked for. Schedulers of diffusers import scipy.stats, 0.2 s,
for an option of theirs."""
_STRUCTURE = "transformers.utils.import_utils"
_ALWAYS_THERE = frozenset({"__all__", "__version__"})
"""Names of two underscores for which a module is run; others are asked of every module by whoever looks through all."""


def spare_imports() -> None:
    """From now on, imports of this process are spared that time."""
    if not any(isinstance(finder, _Sparing) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Sparing())


class _Sparing(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        changes: dict[str, Callable[[Any], Loader]] = {
            _STRUCTURE: _KeepsStructures,
            **dict.fromkeys(DEFERRED, _Deferred),
        }
        if fullname not in changes:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, InspectLoader):
            spec.loader = changes[fullname](spec.loader)
        return spec


class _Changed(Loader):
    """A loader that does something else than another one; it is that one to whoever asks it anything else."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Deferred(_Changed):
    """Runs a module when something of it is first asked for; other threads that ask wait meanwhile."""

    def exec_module(self, module: ModuleType) -> None:
        lock, begun = threading.RLock(), threading.Event()
        names = module.__dict__

        def run() -> None:
            with lock:
                if begun.is_set():
                    return
                begun.set()
                try:
                    self._loader.exec_module(module)
                finally:
                    for name, ours in (("__getattr__", ask), ("__dir__", listed)):
                        if names.get(name) is ours:
                            del names[name]

        def ask(name: str) -> Any:
            if not name.startswith("__") or name in _ALWAYS_THERE:
                run()
                if name in names:
                    return names[name]
                if "__getattr__" in names and names["__getattr__"] is not ask:
                    return names["__getattr__"](name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        def listed() -> list[str]:
            run()
            return sorted(names)

        names["__getattr__"], names["__dir__"] = ask, listed


class _KeepsStructures(_Changed):
    """transformers reads the files of all its models twice, since its memo of 128 entries holds fewer than there are
    folders: with this module, it keeps all."""

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        name = "create_import_structure_from_path"
        plain = getattr(getattr(module, name, None), "__wrapped__", None)
        if plain is not None:
            setattr(module, name, lru_cache(maxsize=None)(plain))
