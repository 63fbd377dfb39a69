"""How many ranks this machine holds: looked at before the first process starts, so that none is started in vain.

Real ranks are bounded by memory and by cores. Ranks that one process simulates (``predict --world``,
``plan --devices``, ``audit`` without ``--real``) are bounded by memory and by a fixed number.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from memfit.errors import InputError
from memfit.sizes import format_size

RANK_BYTES = 384 << 20
"""Private memory of a rank before its job is built: 221 MiB after memfit's and torch's imports (torch 2.13, CPU), the
rest for gloo's threads and for the libraries that a job imports."""
AUDIT_RANK_BYTES = 256 << 20
"""Bytes of a rank that only draws samples: 146 MiB after the imports."""
RANKS_PER_CORE = 8
"""Ranks that share a core only wait for each other; with more than these a collective outlasts its timeout."""
LEAST_RANKS = 16
"""Ranks that are allowed on any number of cores, where memory allows them."""
WORKER_BYTES = 96 << 20
"""Private memory of a worker that reads data: what a forked process touches of its parent's, and what it reads."""
COPY = 2
"""A copy of a process is made where so many times the memory is available that the process takes."""
WORKERS_PER_CORE, LEAST_WORKERS = 16, 32
"""Workers of all ranks that may share a core, since workers wait; so many are allowed on any number of cores."""
RESERVED = 0.1
"""The part of the available memory that is left to the rest of the machine."""
FAKE_RANKS = 16384
"""More ranks than any training run that was published (Llama 3 405B: 16,384 GPUs); a trace of them takes minutes."""
FAKE_RANK_BYTES = 64 << 10
"""Measured 17 KB a rank with ZeRO's stage 3 of 222 tensors; for larger nets, four times that."""

SIMULATED_WORKERS = 1024
"""Workers of a loader that one process simulates; more than any machine has cores for."""

WINDOW_COPIES = 4
"""Copies of a job's state that ``memfit verify`` keeps of each window: 3.4 measured for a GAN with Adam. They are what
the window began with, its optimizers, and its gradients and weights."""
WINDOW_BYTES = 64 << 10
"""Python's objects for one such window: a bound for small nets."""


@dataclass(frozen=True, kw_only=True)
class RankLimit:
    """The largest number of ranks that fits, and what bounds it, in words."""

    ranks: int
    reason: str


def available_bytes() -> int:
    """Memory that this process and its children may still take: the system's, or less in a container or under a limit
    (``ulimit -d``)."""
    available = psutil.virtual_memory().available
    return max(min([available, *_left_in_groups(), *_left_of_data()]), 0)


def has_room_for_copy() -> bool:
    """Whether the machine has the memory for a copy of this process, which shares what neither changes."""
    return available_bytes() >= COPY * psutil.Process().memory_info().rss


def available_cores() -> int:
    """Cores that this process may run on, or as many as its control groups give it the time of (a container)."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(min([cores, *cores_of_groups()]), 1)


def cores_of_groups(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Whole cores of time for each control group of this process that has a quota (Linux, versions 1 and 2)."""
    cores = []
    for controllers, path in _groups(groups):
        top = root / "cpu" if "cpu" in controllers.split(",") else root
        if controllers and top == root:
            continue
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(top):
                break
            with suppress(OSError, ValueError):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    cores.append(int(quota) // int(period))
    return cores


def rank_limit(bytes_each: int, *, bytes_once: int = 0) -> RankLimit:
    """The most real ranks that this machine holds.

    Args:
        bytes_each: what each rank takes, its process included.
        bytes_once: what is taken beside the ranks.
    """
    available, cores = available_bytes(), available_cores()
    by_memory = max(int((available * (1 - RESERVED) - bytes_once) // max(bytes_each, 1)), 0)
    by_cores = max(RANKS_PER_CORE * cores, LEAST_RANKS)
    if by_memory < by_cores:
        shared = f" and {format_size(bytes_once)} once" if bytes_once else ""
        reason = f"each rank takes about {format_size(bytes_each)}{shared}, and {format_size(available)} is free"
        return RankLimit(ranks=by_memory, reason=reason)
    return RankLimit(ranks=by_cores, reason=f"this machine has {cores} core{'s' if cores > 1 else ''}")


def check_ranks(option: str, ranks: int, bytes_each: int = RANK_BYTES, *, bytes_once: int = 0) -> None:
    """Raises InputError where this machine does not hold so many real ranks; it names the most that it holds.

    A single rank always passes: what it trains decides whether it fits, and not how many there are.

    Args:
        option: what was asked, as it was written.
    """
    limit = rank_limit(bytes_each, bytes_once=bytes_once)
    if ranks > max(limit.ranks, 1):
        write = f"write {limit.ranks} or fewer" if limit.ranks > 1 else "run one rank, or use a larger machine"
        why = f"{ranks} ranks do not fit on this machine, at most {max(limit.ranks, 1)} do: {limit.reason}"
        raise InputError(option, why, write)


def check_workers(workers: int | None, ranks: int) -> None:
    """Raises InputError where this machine does not hold so many workers of each rank; it names the most."""
    available, cores = available_bytes(), available_cores()
    by_memory = int(available * (1 - RESERVED) // WORKER_BYTES)
    by_cores = max(WORKERS_PER_CORE * cores, LEAST_WORKERS)
    most = min(by_memory, by_cores) // ranks
    if workers and workers > most:
        reason = f"each takes about {format_size(WORKER_BYTES)}, and {format_size(available)} is free"
        if by_memory >= by_cores:
            reason = f"this machine has {cores} core{'s' if cores > 1 else ''}"
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        why = f"at most {most} workers{each} fit on this machine: {reason}"
        raise InputError(f"--workers {workers}", why, f"write {most} or fewer")


def check_windows(windows: int, state_bytes: int) -> None:
    """Raises InputError where this machine does not hold what ``memfit verify`` keeps of so many windows.

    Args:
        state_bytes: weights, buffers and optimizer states of the job after its first step.
    """
    each, available = WINDOW_COPIES * state_bytes + WINDOW_BYTES, available_bytes()
    most = max(int(available * (1 - RESERVED) // each), 1)
    if windows > most:
        why = f"memfit keeps about {format_size(each)} of each window, and {format_size(available)} is free"
        raise InputError(f"--windows {windows}", why, f"write {most} or fewer")


def check_simulated_workers(workers: int) -> None:
    """Raises InputError where a loader has more workers than are simulated in one process."""
    if workers > SIMULATED_WORKERS:
        why = f"memfit simulates at most {SIMULATED_WORKERS} workers, and no machine has cores for so many"
        raise InputError(f"num_workers={workers} of a loader", why, f"write {SIMULATED_WORKERS} or fewer")


def check_fake_ranks(option: str, ranks: int) -> None:
    """Raises InputError where so many ranks are not simulated in one process; it names the most that are."""
    by_memory = int(available_bytes() * (1 - RESERVED) // FAKE_RANK_BYTES)
    most = max(min(by_memory, FAKE_RANKS), 1)
    if ranks > most:
        raise InputError(option, f"memfit simulates at most {most} ranks on this machine", f"write {most} or fewer")


def check_cards(option: str, ranks: int, device: str) -> None:
    """Raises InputError where a plan for a card has more ranks than this machine has CUDA devices."""
    if device == "cpu":
        return
    import torch

    cards = torch.cuda.device_count()
    if ranks > cards:
        here = f"this machine has {cards or 'no'} CUDA device{'' if cards == 1 else 's'}"
        write = f"plan again with --devices {cards}" if cards else "plan again with --device cpu or --memory SIZE"
        raise InputError(option, here, write)


def _left_of_data() -> list[int]:
    """What RLIMIT_DATA leaves to this process, where it is set."""
    if not hasattr(psutil, "RLIMIT_DATA"):  # psutil has it on Linux
        return []
    process = psutil.Process()
    limit = process.rlimit(psutil.RLIMIT_DATA)[0]
    return [] if limit == psutil.RLIM_INFINITY else [limit - process.memory_info().data]


def _left_in_groups() -> list[int]:
    """What the control groups of this process leave, where they have limits (Linux, versions 1 and 2)."""
    left = []
    for controllers, path in _groups(Path("/proc/self/cgroup")):
        if controllers == "":
            left += _left(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _left(Path("/sys/fs/cgroup/memory"), path, *names)
    return left


def _groups(file: Path) -> list[tuple[str, str]]:
    """Controllers and path of each control group of this process."""
    try:
        return [
            (controllers, path) for _, controllers, path in (x.split(":", 2) for x in file.read_text().splitlines())
        ]
    except OSError:
        return []


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Bytes that are left in this control group and in each that contains it."""
    amounts = []
    folder = root / path.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        try:
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        amounts.append(most - used + int(stat.get(reclaimable, 0)))
    return amounts
