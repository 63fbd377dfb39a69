"""A sandbox for a script (Linux): its writes vanish, it has no network, and nothing outside is changed.

Every writable file system is covered by an overlay, so the script reads the real files and writes anywhere; the overlay
is thrown away. ``/dev`` has only null, zero, random and terminals, ``/run`` is empty (it holds sockets of services),
and processes outside are invisible. Enter the sandbox before any thread exists.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.script import namespaces as ns

_PSEUDO = frozenset(
    {
        "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "debugfs", "tracefs", "securityfs",
        "pstore", "bpf", "configfs", "fusectl", "hugetlbfs", "binfmt_misc", "autofs", "rpc_pipefs", "nsfs", "efivarfs",
    }
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_NEVER_SHOWN = ("/proc", "/sys", "/dev", "/run", "/var/run")


@dataclass(frozen=True, kw_only=True)
class _Mount:
    point: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class OverlayLayer:
    """The upper layer of an overlay: where the script's writes below ``folder`` really go."""

    folder: str
    descriptor: int
    """File descriptor of the directory that receives them."""


class SandboxError(Exception):
    """This machine offers no sandbox."""


def enter_sandbox(scratch: Path, *, writable: Sequence[Path] = ()) -> list[OverlayLayer]:
    """Moves this process into the sandbox. Processes that it forks later are inside too.

    Args:
        scratch: an empty folder of this run, which is deleted afterwards.
        writable: folders whose writes are real.

    Raises:
        SandboxError: the system has no namespaces or overlays, or forbids them.
    """
    if not ns.is_supported():
        raise SandboxError("it needs Linux on x86_64 or aarch64")
    cwd = os.getcwd()
    try:
        own_processes = _may_mount_proc()
        ns.unshare(ns.NEW_USER | ns.NEW_MOUNTS | ns.NEW_NETWORK | ns.NEW_IPC | (ns.NEW_PIDS if own_processes else 0))
        ns.mount("none", "/", "none", ns.RECURSIVE | ns.PRIVATE)
        ns.bring_up_loopback()
        layers = _build_root(scratch, writable, own_processes=own_processes)
    except OSError as error:
        raise SandboxError(str(error.strerror or error)) from error
    if own_processes:
        _fork_and_wait()
    try:
        if own_processes:
            ns.mount("proc", f"{scratch}/tree/proc", "proc", ns.READ_ONLY)
        ns.pivot_root(f"{scratch}/tree")
        os.chdir(cwd)
        ns.drop_capabilities()
    except OSError as error:
        raise SandboxError(str(error.strerror or error)) from error
    return layers


def _fork_and_wait() -> None:
    """Continues in a child, the first process of the new namespace; the parent waits and ends with the same status."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    ns.set_parent_death_signal()


def _may_mount_proc() -> bool:
    """Whether a new process namespace may have its own /proc, which some containers forbid."""
    probe = os.fork()
    if probe:
        _, status = os.waitpid(probe, 0)
        return os.waitstatus_to_exitcode(status) == 0
    code = 1
    with contextlib.suppress(OSError):
        ns.unshare(ns.NEW_USER | ns.NEW_MOUNTS | ns.NEW_PIDS)
        ns.mount("none", "/", "none", ns.RECURSIVE | ns.PRIVATE)
        inner = os.fork()
        if inner == 0:
            with contextlib.suppress(OSError):
                ns.mount("proc", "/proc", "proc")
                code = 0
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    os._exit(code)


def _mounts() -> list[_Mount]:
    """Returns the mounts, each mount point once."""
    rows: dict[str, _Mount] = {}
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        left, _, right = line.partition(b" - ")
        point = _unescaped(left.split()[4])
        rows[point] = _Mount(point=point, kind=right.split()[0].decode())
    return list(rows.values())


def _unescaped(name: bytes) -> str:
    """A path of /proc/self/mountinfo, where a space, for one, is ``\\040``."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), name))


def _build_root(scratch: Path, writable: Sequence[Path], *, own_processes: bool) -> list[OverlayLayer]:
    """Builds a tree like the present one. A folder without other mounts below it is covered by one overlay; otherwise
    (as for the root folder) its entries are mounted one by one, which user namespaces allow.
    """
    root = f"{scratch}/tree"
    os.makedirs(root)
    points = {mounted.point: mounted for mounted in _mounts()}
    ns.mount("tmpfs", root, "tmpfs", 0, "mode=755")
    hidden = (*_NEVER_SHOWN, *(point for point, mounted in points.items() if mounted.kind in _PSEUDO))
    layers: list[OverlayLayer] = []

    def cover(path: str) -> None:
        target = root + (path if path != "/" else "")
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif _is_below(path, hidden):
            os.makedirs(target, exist_ok=True)
        elif not os.path.isdir(path):
            if os.path.isfile(path):
                Path(target).touch()
                _show_read_only(path, target)
        else:
            os.makedirs(target, exist_ok=True)
            if any(point != path and _is_below(point, (path.rstrip("/"),)) for point in points):
                for name in sorted(os.listdir(path)):
                    cover(os.path.join(path, name))
                return
            try:
                layers.append(_overlay(scratch, len(layers), path, target))
            except OSError:
                _show_read_only(path, target)

    cover("/")
    for folder in writable:
        ns.mount(str(folder), root + str(folder), "none", ns.BIND)
    _mount_system(root, own_processes=own_processes)
    return layers


def _show_read_only(path: str, target: str) -> None:
    """Makes what takes no overlay readable only; what cannot be mounted at all is missing."""
    with contextlib.suppress(OSError):
        ns.mount(path, target, "none", ns.BIND)
        ns.make_read_only(target)


def _is_below(point: str, folders: Sequence[str]) -> bool:
    return any(point == folder or point.startswith(folder + "/") for folder in folders)


def _overlay(scratch: Path, number: int, folder: str, target: str) -> OverlayLayer:
    """Mounts an overlay over one folder. If the scratch folder's file system cannot hold the writes, memory holds them.

    Raises:
        OSError: neither can hold them, or the folder's name cannot be written in mount's options.
    """
    if set(folder) & set(":,\\"):
        raise OSError(0, f"{folder} has a name that takes no overlay")
    place = f"{scratch}/layer{number}"
    for kind in ("disk", "memory"):
        os.makedirs(f"{place}/{kind}")
        if kind == "memory":
            ns.mount("tmpfs", f"{place}/{kind}", "tmpfs")
        upper, work = f"{place}/{kind}/upper", f"{place}/{kind}/work"
        os.makedirs(upper)
        os.makedirs(work)
        with contextlib.suppress(OSError):
            ns.mount("overlay", target, "overlay", 0, f"lowerdir={folder},upperdir={upper},workdir={work},userxattr")
            return OverlayLayer(folder=folder, descriptor=os.open(upper, os.O_RDONLY | os.O_DIRECTORY))
    raise OSError(0, f"{folder} takes no overlay")


def _mount_system(root: str, *, own_processes: bool) -> None:
    """Mounts /proc and /sys read-only (they hold settings of the whole system), a small /dev and an empty /run."""
    for folder in ("/sys",) if own_processes else ("/proc", "/sys"):
        if os.path.isdir(folder):
            _show_all_read_only(folder, root)
    ns.mount("tmpfs", f"{root}/dev", "tmpfs", 0, "mode=755")
    for name in _DEVICES:
        Path(f"{root}/dev/{name}").touch()
        ns.mount(f"/dev/{name}", f"{root}/dev/{name}", "none", ns.BIND)
        ns.make_read_only(f"{root}/dev/{name}")
    os.makedirs(f"{root}/dev/shm")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{root}/dev/{name}")
    if os.path.isdir("/run"):
        ns.mount("tmpfs", f"{root}/run", "tmpfs", 0, "mode=755")


def _show_all_read_only(folder: str, root: str) -> None:
    """Mounts a folder and every mount below it read-only; a mount that cannot be is covered by an empty one."""
    ns.mount(folder, root + folder, "none", ns.BIND | ns.RECURSIVE)
    for point in sorted(mounted.point for mounted in _mounts() if _is_below(mounted.point, (root + folder,))):
        try:
            ns.make_read_only(point)
        except OSError:
            ns.mount("tmpfs", point, "tmpfs", ns.READ_ONLY)


@dataclass(frozen=True, kw_only=True)
class OverlayChange:
    """One file that the script wrote, created or deleted, in the sandbox only."""

    path: str
    bytes: int
    deleted: bool = False


def changes(layers: Sequence[OverlayLayer]) -> list[OverlayChange]:
    """The changes of the script, by path."""
    return sorted((change for layer in layers for change in _changes_in(layer)), key=lambda change: change.path)


def _changes_in(layer: OverlayLayer) -> Iterator[OverlayChange]:
    for folder, _, files, descriptor in os.fwalk(".", dir_fd=layer.descriptor):
        for name in files:
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            path = os.path.normpath(os.path.join(layer.folder, folder, name))
            is_whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
            yield OverlayChange(path=path, bytes=0 if is_whiteout else status.st_size, deleted=is_whiteout)
