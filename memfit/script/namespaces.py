"""The Linux system calls that a sandbox is made of, through libc: namespaces, mounts, capabilities."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
from functools import cache
from pathlib import Path

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_RELATIVE_TIMES = 0x200000
_DETACH = 2
_SET_PARENT_DEATH_SIGNAL, _DROP_FROM_BOUNDING_SET, _SET_NO_NEW_PRIVILEGES = 1, 24, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_MOST_CAPABILITIES = 64
_IGNORE_MODES = 1
"""CAP_DAC_OVERRIDE: file modes do not restrict access, as for root."""
_SET_INTERFACE_FLAGS, _IS_UP = 0x8914, 0x1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def is_supported() -> bool:
    """Whether the numbers of the system calls are known for this machine."""
    return platform.system() == "Linux" and platform.machine() in _PIVOT_ROOT


def unshare(flags: int) -> None:
    """Moves this process into new namespaces, and keeps its user and group as they are.

    Raises:
        OSError: the kernel refuses, as do many containers.
    """
    user, group = os.getuid(), os.getgid()
    _check(_libc().unshare(flags), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """mount(2).

    Raises:
        OSError: the kernel refuses.
    """
    encoded = [os.fsencode(text) for text in (source, target, kind)]
    _check(_libc().mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) or None), f"mount {target}")


def make_read_only(target: str) -> None:
    """Makes a mount point readable only, including owners and modes of its files. Devices can still be written to.

    Raises:
        OSError: the kernel refuses.
    """
    flags = os.statvfs(target).f_flag
    kept = flags & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)
    kept |= _RELATIVE_TIMES if flags & os.ST_RELATIME else 0  # a user namespace may not take such a flag away
    mount("none", target, "none", REMOUNT | BIND | READ_ONLY | kept)


def pivot_root(root: str) -> None:
    """Makes ``root``, a mount point, the root folder; the previous root is no longer reachable."""
    os.chdir(root)
    _check(_libc().syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(_libc().umount2(b".", _DETACH), "umount the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Gives up every capability for good: this process and its children cannot mount anything again. Root alone keeps
    CAP_DAC_OVERRIDE, so its scripts can write to folders of any mode.
    """
    libc = _libc()
    kept = 1 << _IGNORE_MODES if os.getuid() == 0 else 0
    for capability in range(_MOST_CAPABILITIES):
        if not kept & 1 << capability:
            libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    _check(libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    sets = ctypes.create_string_buffer(struct.pack("6I", kept, kept, 0, 0, 0, 0))
    _check(libc.syscall(_CAPSET[platform.machine()], header, sets), "capset")


def set_parent_death_signal(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal, by default to kill it, when its parent ends."""
    _libc().prctl(_SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)


def bring_up_loopback() -> None:
    """Enables 127.0.0.1 inside a new network namespace; nothing else is reachable."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        fcntl.ioctl(opened, _SET_INTERFACE_FLAGS, struct.pack("16sH14s", b"lo", _IS_UP, b""))
