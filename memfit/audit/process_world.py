"""A world in real processes: one for each rank, in a gloo group, with the collectives that the target makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memfit.audit.drawn_json import drawn_from_json
from memfit.audit.observe import Drawn
from memfit.child_process import error_descriptor, for_child
from memfit.device.hardware.loopback import loopback_environment
from memfit.errors import InputError, describe

SECONDS = 300
"""A world that takes longer is taken for one that hangs."""


def run_world(target: str, world: int, seconds: float = SECONDS) -> list[Drawn]:
    """What each rank draws in two epochs, each rank a process.

    Raises:
        InputError: a rank fails, or the ranks are not done in time, as when they wait for each other for ever.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                processes.append(_start(target, rank, world, folder))
            _wait(target, processes, folder, seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [drawn_from_json(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def _start(target: str, rank: int, world: int, folder: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, **loopback_environment(), **for_child(),
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    arguments = [sys.executable, "-m", "memfit.audit.rank_entry", target, str(rank), str(world), folder]
    try:
        return subprocess.Popen(arguments, env=environment, stdout=error_descriptor(), start_new_session=True)
    except OSError as error:
        why = f"the system does not start rank {rank}: {describe(error)}"
        raise InputError(f"--world-sizes {world} with --real", why, f"write {max(rank, 1)} or fewer") from error


def _wait(target: str, processes: list[subprocess.Popen[bytes]], folder: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > until:
            waiting = [rank for rank, process in enumerate(processes) if process.poll() is None]
            raise InputError(
                f"target {target!r} on {len(processes)} ranks",
                f"ranks {waiting} are not done after {seconds:g} s, which is what ranks do that wait for each other",
                "audit it without --real, which shows who has more batches",
            )
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(processes) if process.poll()]
    if failed:
        raise _failed(target, failed[0], len(processes), folder)


def _failed(target: str, rank: int, world: int, folder: str) -> InputError:
    """The error of the rank that failed first: the others fail because it is gone."""
    said = sorted(Path(folder).glob("*.failed"), key=lambda file: file.stat().st_mtime_ns)
    text = said[0].read_text(encoding="utf-8") if said else "its process ended"
    first = int(said[0].stem) if said else rank
    return InputError(f"target {target!r} as rank {first} of {world}", text, "run that rank by itself to see more")
