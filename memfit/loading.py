"""Loading a job: a built-in name, ``package.module:Name`` or ``path/file.py:Name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.distributions import distributions_when_asked
from memfit.errors import InputError, describe, missing_extra
from memfit.job import Job


def built_in_jobs() -> dict[str, str]:
    """Names of the built-in jobs and where they are: ``module:Class``."""
    jobs: dict[str, str] = importlib.import_module("memfit.jobs").BUILTIN
    return jobs


def read_settings(pairs: Iterable[str], option: str = "--set") -> dict[str, str]:
    """``("depth=3", …)`` as a dict.

    Args:
        option: that they were given to.

    Raises:
        InputError: no ``=``, or a name twice.
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise InputError(f"{option} {pair}", "not name=value", f"write {option} name=value")
        if name.strip() in settings:
            raise InputError(f"{option} {pair}", f"{name.strip()} is set twice", "write it once")
        settings[name.strip()] = value.strip()
    return settings


def load_job(spec: str, settings: dict[str, Any] | None = None, *, unit: str | None = None) -> Job:
    """The job that a spec names, with its settings.

    Args:
        unit: what a plan of it counts.

    Raises:
        InputError: it cannot be found or imported, is no Job, counts another unit, or a setting is wrong.
    """
    where = built_in_jobs().get(spec, spec)
    module_name, colon, name = where.rpartition(":")
    if module_name == "torchtitan":
        raise InputError(f"job {spec!r}", "a configuration of torchtitan is no job", f"write memfit predict {spec}")
    if not (colon and name and module_name.strip(".")):
        near = difflib.get_close_matches(spec, built_in_jobs(), n=1)
        if spec.rstrip(":").endswith(".py"):
            file = spec.rstrip(":")
            write = f"write {file}:Name, or, for a script, its command: -- python {file}"
            raise InputError(f"job {spec!r}", "a file without the name of a job in it", write)
        hint = (
            f"write {near[0]}"
            if near
            else "write a built-in name (memfit jobs), package.module:Name or path/file.py:Name"
        )
        raise InputError(f"job {spec!r}", "no built-in job of that name", hint)
    with distributions_when_asked():
        module = (
            _load_file(Path(module_name), of_plan=unit is not None)
            if module_name.endswith(".py")
            else _import(module_name, spec if spec in built_in_jobs() else module_name)
        )
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], n=1)
        hint = f"write {module_name}:{near[0]}" if near else f"write {module_name}:{_jobs_of(module)}"
        raise InputError(f"job {spec!r}", f"{module_name} has no {name}", hint)
    job_class = getattr(module, name)
    if isinstance(job_class, Job):
        job_class = type(job_class)
    if not (isinstance(job_class, type) and issubclass(job_class, Job)) or job_class is Job:
        raise InputError(
            f"job {spec!r}",
            f"{name} is no class that derives from memfit.Job",
            f"write {module_name}:{_jobs_of(module)}",
        )
    if unit is not None and unit != job_class.unit:
        write = "make the plan again with memfit plan --out"
        raise InputError(f"a plan of {spec} in {unit}", f"the job counts {job_class.unit}", write)
    _check_constructor(job_class)
    with _compiled_noted():
        job: object = job_class(**(settings or {}))
    if not isinstance(job, Job):
        why = f"its metaclass or __new__ made a {type(job).__name__} of it"
        raise InputError(f"job {spec!r}", why, f"write a class whose instances are {name}")
    return job


def _check_constructor(kind: type[Job]) -> None:
    """A job is made again from its settings, on other ranks and in other phases: its constructor must take them.

    Raises:
        InputError: the class has an ``__init__`` that does not take every setting by name, or hides a method that it
            needs.
    """
    for name in ("settings", "setting_types", "__init__"):
        if not callable(value := getattr(kind, name)):
            seen = f"{kind.__name__}.{name} = {value!r}"
            raise InputError(seen, "it hides the method of that name", "take it out, or rename it")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        write = f"write def {missing[0]}(self, ...) in it, or name a class that has it"
        raise InputError(f"job {kind.__name__}", f"an abstract class: it lacks {', '.join(missing)}", write)
    parameters = inspect.signature(kind.__init__).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    raise InputError(
        f"{kind.__name__}.__init__()",
        "memfit makes a job from its settings alone, by name",
        "take __init__ out and write settings as annotated class attributes (width: int = 8), or write "
        "__init__(self, **settings) and call super().__init__(**settings) first",
    )


def _jobs_of(module: ModuleType) -> str:
    """The jobs that a module defines, for a hint."""
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Job) and value is not Job
    ]
    return "|".join(names[:8]) or "Name, with class Name(memfit.Job) in it"


_FILE = "memfit_file_"
"""Begins the name of a job file's module: a file may be named as a library is."""


def module_in_words(name: str) -> str:
    """A module's name as a person wrote it: ``train`` for the job file train.py."""
    return name.removeprefix(_FILE)


def module_of_file(path: Path, name: str) -> tuple[ModuleType, Callable[[], None]]:
    """(a module for a file, known by this name and not run yet; what runs it). Its folder is importable from now on."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return module, partial(spec.loader.exec_module, module)


def _compiled_noted() -> AbstractContextManager[None]:
    """A context in which what torch.compile is given is noted; a question that loads no job imports no torch."""
    from memfit.torch_compat.compiled_callables import compiled_noted

    return compiled_noted()


def _load_file(path: Path, *, of_plan: bool = False) -> ModuleType:
    """Runs a job's file. Its folder stays importable, as under ``python file.py``: its nets may import on first use."""
    if not path.is_file():
        if of_plan and not path.is_absolute():
            why = "the plan names a file that is not there from this folder"
            write = f"go to the folder from which {path} is its path, and repeat the command"
            raise InputError(f"job {path}", why, write)
        raise InputError(f"job {path}", "no such file", "write the path of a Python file, as path/file.py:Name")
    module, run = module_of_file(path, f"{_FILE}{path.stem}")
    try:
        with _compiled_noted():
            run()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"job {path}:{line}" if line else f"job {path}"
        raise missing_extra(error, where) or InputError(
            where, f"it does not import: {describe(error)}", f"mend it until python {path} runs"
        ) from error
    return module


def _import(module: str, name: str) -> ModuleType:
    try:
        with _compiled_noted():
            return importlib.import_module(module)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        write = "write package.module:Name of an installed module, or path/file.py:Name"
        raise missing_extra(error, f"job {name}") or InputError(
            f"job {name}", f"it does not import: {describe(error)}", write
        ) from error
