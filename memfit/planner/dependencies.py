"""Dependencies of a trace: the files that a job's code and data come from, so that a kept trace is known to hold still.

A file of the person's (code that was imported, any file that was read) is known by its content, an installed library
by the size and time of its first file. What a data set reads is apart: its files, which may be many and large, are
known by size and time, the folders that it lists by the names in them. A file that another process changes after it was
read here is another file by then: nothing that was made of it is kept. Not seen: files that were looked for and are not
there, the clock, the network.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import source_from_cache
from pathlib import Path
from weakref import WeakValueDictionary

from memfit.user_cache import cache_folder

LARGEST = 64 << 20
"""Bytes up to which a file is known by its content, and beyond by its size and time."""


Reads = dict[str, str]
"""By path, the size and time of a file when it was opened first, or the names in a folder; empty where it was none."""


@dataclass
class DataReads:
    """What was read while a data set was asked."""

    files: Reads = field(default_factory=dict)
    folders: Reads = field(default_factory=dict)
    """Those whose names were listed."""

    def marks(self) -> dict[str, str]:
        """Fingerprints by path of what is no library's, as it was when it was read."""
        known = {path: mark for path, mark in (self.files | self.folders).items() if not _is_library(path)}
        marks = {path: _data_mark(path) if path in _written else mark for path, mark in known.items()}
        return {path: mark for path, mark in marks.items() if mark}


class FileReads(Reads):
    """Every file that this process opens for reading while this lives, but for what is recorded as data; for compiled
    code, its source."""

    def __init__(self) -> None:
        _install_hook()
        _reads[id(self)] = self


_reads: WeakValueDictionary[int, FileReads] = WeakValueDictionary()
_written: set[str] = set()
"""The files that this process has written itself."""
_data: list[DataReads] = []
"""Open records of data; while one is open, what is read goes to the innermost alone."""


@contextmanager
def recorded_data() -> Iterator[DataReads]:
    """Notes what is read inside, apart from the other reads of this process."""
    _install_hook()
    _data.append(DataReads())
    try:
        yield _data[-1]
    finally:
        _data.pop()


def dependencies(reads: Reads) -> dict[str, str] | None:
    """Fingerprints by path of what was imported and read up to now; None where another process has changed some of it
    since."""
    files: dict[str, str] = {}
    generated = _generated_by_torch()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not _is_library(file):
            files[file] = ""
        elif file and "." not in name:
            files[file] = "stat"
    files |= {path: "" for path in reads if not _is_library(path)}
    kept = {path: how for path, how in files.items() if not generated or not path.startswith(generated)}
    if any(_has_changed(path, reads) for path in kept):
        return None
    return {path: mark for path, how in kept.items() if (mark := _mark(path, by_time=how == "stat"))}


def _has_changed(path: str, reads: Reads) -> bool:
    """Whether a file is another than when it was read, and this process has not written it."""
    first = reads.get(path)
    return bool(first) and path not in _written and _mark(path, by_time=True) != first


def _generated_by_torch() -> str:
    """The folder of modules that torch writes anew in each process (torch.distributed.nn); empty where it has none."""
    writer = sys.modules.get("torch.distributed.nn.jit.instantiator")
    return str(getattr(writer, "INSTANTIATED_TEMPLATE_DIR_PATH", ""))


def still_hold(known: Mapping[str, str]) -> bool:
    """Whether every file is as it was."""
    return all(_mark(path, by_time=not mark.startswith("sha256")) == mark for path, mark in known.items())


def data_still_hold(known: Mapping[str, str]) -> bool:
    """Whether a data set's files and folders are as they were."""
    return all(_data_mark(path) == mark for path, mark in known.items())


def _data_mark(path: str) -> str:
    """A file's size and time, or the names in a folder; empty where it is neither."""
    try:
        if os.path.isdir(path):
            names = "\0".join(sorted(os.listdir(path)))
            return f"names {hashlib.sha256(os.fsencode(names)).hexdigest()}"
    except OSError:
        return ""
    return _mark(path, by_time=True)


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


_LISTINGS, _PATHS = ("os.listdir", "os.scandir"), (str, bytes, type(None))


@cache
def _install_hook() -> None:
    """An audit hook cannot be taken out again; where nothing is recorded it does nothing."""

    libraries = _library_folders()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if not (_data or _reads):
            return
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if path.startswith(libraries):
                return
            if writes(arguments[1], arguments[2]):
                _written.add(path)
            else:
                path = _source_of(path)
                for files in [_data[-1].files] if _data else list(_reads.values()):
                    if not files.get(path):
                        files[path] = _mark(path, by_time=True)
        elif event == "os.rename" and isinstance(arguments[1], (str, bytes)):
            _written.add(os.path.abspath(os.fsdecode(arguments[1])))
        elif _data and event in _LISTINGS and isinstance(arguments[0], _PATHS) and not _is_import():
            folders, path = _data[-1].folders, os.path.abspath(os.fsdecode(arguments[0] or "."))
            if path not in folders:
                folders[path] = ""  # to list its names calls this hook again
                folders[path] = _data_mark(path)

    sys.addaudithook(hook)


def _source_of(path: str) -> str:
    """The source of compiled code, which Python compares before it reads that; any other path as it is."""
    if path.endswith(".pyc"):
        with suppress(ValueError):
            return source_from_cache(path)
    return path


def _is_import() -> bool:
    """Whether it is Python's search for modules that the hook was called for."""
    return sys._getframe(2).f_code.co_filename.startswith("<frozen importlib")


def writes(mode: object, flags: object) -> bool:
    """Whether a file is opened to be written, by the arguments of the audit event ``open``."""
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_library(path: str) -> bool:
    folders = (*_library_folders(), *_spellings(str(cache_folder())))
    return path.startswith(folders) or os.path.realpath(path).startswith(folders)


@cache
def _library_folders() -> tuple[str, ...]:
    """Folders of installed code, of memfit itself, and of the system's own files."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
    paths |= {"/proc", "/sys", "/dev", "/etc", "/usr"}
    return tuple(folder for path in paths for folder in _spellings(path))


@cache
def _spellings(folder: str) -> tuple[str, str]:
    """A folder as it is written, and without links."""
    return os.path.join(folder, ""), os.path.join(os.path.realpath(folder), "")
