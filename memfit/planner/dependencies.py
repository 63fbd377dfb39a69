"""Dependencies of a trace: the files that a job's code and data come from, so that a kept trace is known to hold still.

A file of the person's (code that was imported, any file that was read) is known by its content, an installed library
by the size and time of its first file. Not seen: files that were looked for and are not there, the clock, the network.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

LARGEST = 64 << 20
"""Bytes up to which a file is known by its content, and beyond by its size and time."""

_recorders: list[set[str]] = []


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Notes every file that this process opens for reading."""
    reads: set[str] = set()
    _install_hook()
    _recorders.append(reads)
    try:
        yield reads
    finally:
        _recorders[:] = [recorder for recorder in _recorders if recorder is not reads]


@cache
def reads_of_this_process() -> set[str]:
    """Every file that this process opens for reading, from the first call on."""
    reads: set[str] = set()
    _install_hook()
    _recorders.append(reads)
    return reads


def dependencies(reads: set[str]) -> dict[str, str]:
    """Fingerprints by path of what was imported and read up to now."""
    files: dict[str, str] = {}
    generated = _generated_by_torch()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not _is_library(file):
            files[file] = ""
        elif file and "." not in name:
            files[file] = "stat"
    files |= {path: "" for path in reads if not _is_library(path) and not path.endswith(".pyc")}
    kept = {path: how for path, how in files.items() if not generated or not path.startswith(generated)}
    return {path: mark for path, how in kept.items() if (mark := _mark(path, by_time=how == "stat"))}


def _generated_by_torch() -> str:
    """The folder of modules that torch writes anew in each process (torch.distributed.nn); empty where it has none."""
    writer = sys.modules.get("torch.distributed.nn.jit.instantiator")
    return str(getattr(writer, "INSTANTIATED_TEMPLATE_DIR_PATH", ""))


def still_hold(known: Mapping[str, str]) -> bool:
    """Whether every file is as it was."""
    return all(_mark(path, by_time=not mark.startswith("sha256")) == mark for path, mark in known.items())


@cache
def own_fingerprint() -> str:
    """memfit's own files, by size and time."""
    root = Path(__file__).parents[1]
    files = sorted(path for pattern in ("**/*.py", "**/*.toml") for path in root.glob(pattern))
    return hashlib.sha256("".join(f"{path}{_mark(str(path), by_time=True)}" for path in files).encode()).hexdigest()


def _mark(path: str, *, by_time: bool) -> str:
    """A file's fingerprint; empty where it is no file."""
    try:
        status = os.stat(path)
        if not os.path.isfile(path):
            return ""
        if by_time or status.st_size > LARGEST:
            return f"{status.st_size} {status.st_mtime_ns}"
        return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError:
        return ""


@cache
def _install_hook() -> None:
    """An audit hook cannot be taken out again; without a recorder it does nothing."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and _recorders and isinstance(arguments[0], (str, bytes)):
            mode, flags = arguments[1], arguments[2]
            writes = isinstance(mode, str) and any(letter in mode for letter in "wax")
            writes |= mode is None and isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
            if not writes:
                path = os.path.abspath(os.fsdecode(arguments[0]))
                for reads in _recorders:
                    reads.add(path)

    sys.addaudithook(hook)


def _is_library(path: str) -> bool:
    return path.startswith(_library_folders()) or os.path.realpath(path).startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    """Folders of installed code, of memfit itself, and of the system's own files."""
    from memfit.user_cache import cache_folder

    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1]), str(cache_folder())}
    paths |= {"/proc", "/sys", "/dev", "/etc", "/usr"}
    return tuple(os.path.join(folder, "") for path in paths for folder in (path, os.path.realpath(path)))
