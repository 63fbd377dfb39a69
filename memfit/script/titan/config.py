"""A configuration of torchtitan 0.3, found in its registries, with settings changed by name."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import InputError, describe, install_extra, is_installed
from memfit.installation import release_number
from memfit.script.stubs import stubbed
from memfit.script.titan.target import PREFIX, STAND_INS, TitanTarget

POLICY = "activation_checkpoint"
"""The setting of which each value is a class of its own."""
_FIRST = (0, 3)
"""The first version of torchtitan whose configurations are functions."""
_PACKAGES = {"fla": "flash-linear-attention"}
"""Packages whose name is not that of their module."""
_PLACES = ("torchtitan.models", "torchtitan.experiments")


@contextmanager
def importable() -> Iterator[None]:
    """Context in which torchtitan is imported; stand-ins take the place of ``STAND_INS`` that are not installed.

    Raises:
        InputError: torchtitan is older than 0.3, or does not import beside this torch.
    """
    version = importlib.metadata.version("torchtitan")
    if release_number(version) < _FIRST:
        why = "memfit runs the trainer of torchtitan 0.3 and later, whose configurations are functions"
        raise InputError(f"torchtitan {version}", why, f"run {install_extra('titan')}")
    with stubbed([name for name in STAND_INS if not is_installed(name)]):
        try:
            import torchtitan.trainer  # noqa: F401
        except (ImportError, AttributeError) as error:
            write = "install the versions that belong together"
            seen = f"torchtitan {version} with torch {torch.__version__}"
            raise InputError(seen, describe(error), write) from error
        yield


def configurations() -> dict[str, list[str]]:
    """By model, the names of its configurations; of none that does not import. Inside of ``importable``."""
    from torchtitan.models import _supported_models

    registries = {model: _registry(model, required=False) for model in sorted(_supported_models)}
    return {model: sorted(_configurations(registry)) for model, registry in registries.items() if registry is not None}


def load_config(target: TitanTarget) -> Any:
    """The target's ``Trainer.Config``, with its changes made. Inside of ``importable``.

    Raises:
        InputError: there is no such model, configuration or setting, or a value that does not suit one.
    """
    try:
        config = _function(target)()
    except (ImportError, ValueError, RuntimeError, AssertionError) as error:
        write = "install what it needs, or name another configuration"
        raise InputError(f"{PREFIX}{target.config}", describe(error), write) from error
    changed = [config]
    for name, value in target.changes.items():
        changed.append(_change(config, name, value))
    for owner in reversed(changed):
        check = getattr(owner, "__post_init__", None)
        try:
            check() if check is not None else None
        except (ValueError, AssertionError, NotImplementedError) as error:
            write = "change the settings it names"
            raise InputError(f"{PREFIX}{target.config}", describe(error), write) from error
    return config


def _function(target: TitanTarget) -> Callable[[], Any]:
    """The function of a registry that makes the configuration."""
    from torchtitan.models import _supported_models

    names = [target.module] if target.module else sorted(_supported_models, key=lambda model: _far(model, target))
    known: dict[str, str] = {}
    absent = []
    for model in names:
        registry = _registry(model, required=bool(target.module))
        absent += [model] if registry is None else []
        functions = {} if registry is None else _configurations(registry)
        if target.config in functions:
            return functions[target.config]
        known |= dict.fromkeys(functions, model)
    seen = f"{PREFIX}{target.module}/{target.config}" if target.module else f"{PREFIX}{target.config}"
    near = difflib.get_close_matches(target.config, known, n=1, cutoff=0.4)
    if target.config in _supported_models and not target.module:
        known = dict.fromkeys(_configurations(_registry(target.config, required=True)), target.config)
        raise InputError(seen, "a model of several configurations", f"write {PREFIX} with one of {', '.join(known)}")
    write = f"write {PREFIX}{known[near[0]]}/{near[0]}" if near else f"write {PREFIX} with one of {', '.join(known)}"
    why = "torchtitan has no such configuration"
    if absent:
        why += f" in the models that import here; {', '.join(absent)} did not"
        write += f", or {PREFIX}{absent[0]}/{target.config} to see what is missing"
    raise InputError(seen, why, write)


def _far(model: str, target: TitanTarget) -> float:
    """How unlike a model's name and a configuration's are: the likely registry is imported first."""
    return -difflib.SequenceMatcher(None, model, target.config).ratio()


def _registry(model: str, *, required: bool) -> Any:
    """The module with a model's configurations; None where it does not import.

    Raises:
        InputError: it is ``required``, and there is none, or it does not import.
    """
    from torchtitan.models import _supported_models

    places = [f"{place}.{model}.config_registry" for place in _PLACES] + [f"{model}.config_registry", model]
    for place in places:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            absent = error.name is not None and (place == error.name or place.startswith(f"{error.name}."))
            if absent or not required:
                continue
            why = f"it needs {error.name}, which is not installed"
            package = _PACKAGES.get(error.name or "", error.name)
            raise InputError(f"{PREFIX}{model}", why, f"install {package}") from error
        except ImportError as error:
            if required:
                raise InputError(f"{PREFIX}{model}", describe(error), "install the versions it needs") from error
    if not required:
        return None
    models = ", ".join(sorted(_supported_models))
    raise InputError(f"{PREFIX}{model}", "torchtitan has no such model", f"write one of {models}, or a package's name")


def _configurations(registry: Any) -> dict[str, Callable[[], Any]]:
    """Public functions of a registry that need no arguments."""
    return {
        name: function
        for name, function in vars(registry).items()
        if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == registry.__name__
        and not inspect.signature(function).parameters
    }  # fmt: skip


def _change(config: Any, name: str, value: Any) -> Any:
    """Sets one setting; returns the part of the configuration that holds it."""
    if name in (POLICY, f"{POLICY}.mode"):
        config.activation_checkpoint = _policy(name, value)
        return config
    owner, *path = config, *name.split(".")
    for part in path[:-1]:
        owner = getattr(owner, _known(owner, name, part))
    last = _known(owner, name, path[-1])
    kind = typing.get_type_hints(type(owner)).get(last, str)
    setattr(owner, last, _converted(name, value, kind))
    return owner


def _known(owner: Any, name: str, part: str) -> str:
    """A field of a part of the configuration."""
    fields = [field for field in getattr(owner, "__dataclass_fields__", {}) if not field.startswith("_")]
    if part in fields:
        return part
    near = difflib.get_close_matches(part, fields, n=1)
    write = f"write {name.replace(part, near[0])}" if near else f"write one of {', '.join(fields) or 'no part of it'}"
    raise InputError(f"setting {name!r}", f"the configuration has no {part}", write)


def _policy(name: str, value: Any) -> Any:
    """A policy of activation checkpointing by its name."""
    from torchtitan.distributed import activation_checkpoint as policies

    known = {
        "none": None, "selective": policies.SelectiveAC.Config, "full": policies.FullAC.Config,
        "memory_budget": policies.MemoryBudgetAC.Config,
    }  # fmt: skip
    if value not in known:
        raise InputError(f"{name}={value}", "no policy of torchtitan", f"write one of {', '.join(known)}")
    policy = known[value]
    return None if policy is None else policy()


_TRUTH = {"true": True, "false": False}


def _converted(name: str, value: Any, kind: Any) -> Any:
    """A value of --set or of a TOML file, in a setting's type."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if typing.get_origin(kind) is typing.Literal:
        if value in typing.get_args(kind):
            return value
        raise InputError(f"{name}={value}", "no value that it takes", f"write one of {_listed(typing.get_args(kind))}")
    for each in kinds:
        if each is bool and (isinstance(value, bool) or value in _TRUTH):
            return value if isinstance(value, bool) else _TRUTH[value]
        if each in (int, float) and not isinstance(value, bool) and isinstance(value, int | float | str):
            try:
                return each(value)
            except ValueError:
                continue
        if each is type(None) and value in ("none", "None"):
            return None
        if each is str and isinstance(value, str):
            return value
        if typing.get_origin(each) is list and isinstance(value, list):
            return value
        if each == list[str] and isinstance(value, str):
            return value.split(",")
    raise InputError(f"{name}={value}", f"it takes {_listed(kinds)}", "write a value of that type")


def _listed(values: Any) -> str:
    return ", ".join(value if isinstance(value, str) else getattr(value, "__name__", str(value)) for value in values)
