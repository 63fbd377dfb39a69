"""Loading a job: a built-in name, ``package.module:Name`` or ``path/file.py:Name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.errors import InputError
from memfit.job import Job


def built_in_jobs() -> dict[str, str]:
    """Names of the built-in jobs and where they are: ``module:Class``."""
    jobs: dict[str, str] = importlib.import_module("memfit.jobs").BUILTIN
    return jobs


def read_settings(pairs: Iterable[str]) -> dict[str, str]:
    """``("depth=3", …)`` as a dict.

    Raises:
        InputError: no ``=``, or a name twice.
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise InputError(f"--set {pair}", "not name=value", "write --set name=value")
        if name.strip() in settings:
            raise InputError(f"--set {pair}", f"{name.strip()} is set twice", "write it once")
        settings[name.strip()] = value.strip()
    return settings


def load_job(spec: str, settings: dict[str, Any] | None = None) -> Job:
    """The job that a spec names, with its settings.

    Raises:
        InputError: it cannot be found or imported, is no Job, or a setting is wrong.
    """
    where = built_in_jobs().get(spec, spec)
    module_name, colon, name = where.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(spec, built_in_jobs(), n=1)
        hint = f"write {near[0]}" if near else "write a built-in name (memfit jobs), package.module:Name or path/file.py:Name"
        raise InputError(f"job {spec!r}", "no built-in job of that name", hint)
    found = load_object(module_name, name, "job")
    if isinstance(found, Job):
        found = type(found)
    if not (isinstance(found, type) and issubclass(found, Job)):
        raise InputError(f"job {spec!r}", f"{name} is not a memfit.Job", f"write class {name}(memfit.Job)")
    return found(**(settings or {}))


def load_object(module: str, name: str, what: str) -> Any:
    """An attribute of a module, given as ``package.module`` or ``path/file.py``."""
    loaded = _load_file(Path(module), what) if module.endswith(".py") else _import(module, what)
    if not hasattr(loaded, name):
        names = [key for key in vars(loaded) if not key.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        raise InputError(f"{what} {module}:{name}", f"{module} has no {name}", f"write {module}:{near[0]}" if near else "name something it defines")
    return getattr(loaded, name)


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{what} {path}", "no such file", "write the path of a Python file, as path/file.py:Name")
    spec = importlib.util.spec_from_file_location(f"memfit_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{what} {path}", f"it does not import: {type(error).__name__}: {error}", "mend the file; python " + str(path)) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _import(module: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise InputError(f"{what} {module}", f"it does not import: {type(error).__name__}: {error}", "write package.module:Name of an installed module, or path/file.py:Name") from error
