"""What is installed: versions, optional parts, and folders that memfit writes to. torch is not imported."""

from __future__ import annotations

import errno
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

WRITTEN_BYTES = 1 << 16
"""That a folder must have room for: a kept trace of a small job."""


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
    why: str = ""
    """Why it cannot be written, as the system says it; empty where it can be."""


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
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # it tries to write into each, and none has room
        temporary = os.environ.get("TMPDIR") or "/tmp"
    named = {"cache": str(cache_folder()), "temporary": temporary}
    reasons = {purpose: _why_not_writable(Path(path)) for purpose, path in named.items()}
    return [
        Folder(purpose=purpose, path=path, writable=not reasons[purpose], why=reasons[purpose])
        for purpose, path in named.items()
    ]


def _why_not_writable(folder: Path) -> str:
    """Why a small file cannot be written there, or in the nearest folder above that exists; empty where it can."""
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder, prefix=".memfit-doctor-", buffering=0) as file:
            if file.write(bytes(WRITTEN_BYTES)) < WRITTEN_BYTES:
                return os.strerror(errno.ENOSPC)
    except OSError as error:
        return error.strerror or str(error)
    return ""
