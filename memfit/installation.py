"""What is installed: versions, optional parts, and folders that memfit writes to. torch is not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import EXTRAS, install_extra, is_installed
from memfit.user_cache import cache_folder


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The torch that is installed."""

    version: str
    """The version with its local part: 2.13.0+cpu."""
    built_for: str
    """``CPU``, ``CUDA 13.0`` or ``ROCm 7.0``."""


@dataclass(frozen=True, kw_only=True)
class OptionalPart:
    """An optional part of memfit, and what of it is installed."""

    name: str
    versions: Mapping[str, str]
    """Versions of the installed modules; "unknown" where the distribution does not say."""
    missing: tuple[str, ...]

    @property
    def install(self) -> str:
        """The command that installs it."""
        return install_extra(self.name)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that memfit writes to."""

    purpose: str
    path: str
    writable: bool


def memfit_version() -> str:
    """The installed version; "unknown" in a source tree that is not installed."""
    return version_of("memfit")


def version_of(distribution: str) -> str:
    """The version of an installed distribution, or "unknown"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def release_number(version: str) -> tuple[int, int]:
    """(2, 13) of ``2.13.0+cpu``; (0, 0) of a text that is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def python_version() -> str:
    """The interpreter and its version: ``CPython 3.11.7``."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def torch_build() -> TorchBuild | None:
    """The torch that would be imported, read from its version file; None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except OSError:
        return TorchBuild(version=version_of("torch"), built_for="unknown")
    cuda, hip = values.get("cuda"), values.get("hip")
    built_for = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return TorchBuild(version=str(values.get("__version__", "unknown")), built_for=built_for)


def optional_parts() -> list[OptionalPart]:
    """Every optional part, and which of its modules are installed."""
    names = importlib.metadata.packages_distributions()
    parts = []
    for extra, modules in EXTRAS.items():
        there = [module for module in modules if is_installed(module)]
        versions = {module: version_of(names.get(module, [module])[0]) for module in there}
        missing = tuple(module for module in modules if module not in there)
        parts.append(OptionalPart(name=extra, versions=versions, missing=missing))
    return parts


def folders() -> list[Folder]:
    """The folders that memfit writes to beside those that you name."""
    return [
        Folder(purpose="cache", path=str(cache_folder()), writable=_is_writable(cache_folder())),
        Folder(purpose="temporary", path=tempfile.gettempdir(), writable=_is_writable(Path(tempfile.gettempdir()))),
    ]


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there, or in the nearest folder above that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
