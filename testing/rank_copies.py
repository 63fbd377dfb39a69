"""Ranks of a test as copies of one process, which imports torch and the ranks' module once and not in each of them.

How torchrun starts ranks is tested where it does (tests/train/test_ranks.py, tests/engine/test_listen_address.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

from memfit.child_process import PARENT, die_with_parent, for_child
from memfit.garbage import freeze_loaded
from testing.ports import free_port

ROOT = Path(__file__).parents[1]


def run_ranks(
    world: int, module: str, arguments: Sequence[str], *, timeout: float = 180, apart: bool = False, **environment: str
) -> None:
    """Calls ``main()`` of a module in so many ranks of one machine, with the environment that torchrun gives them.

    Args:
        arguments: ``sys.argv[1:]`` of each rank.
        timeout: seconds after which the ranks are killed.
        apart: each rank imports the module itself, since later ranks must not begin with what it imports.
        environment: variables beside those of this process.

    Raises:
        RuntimeError: a rank failed; the others were killed. What it raised stands on standard error.
        TimeoutError: the ranks did not end.
    """
    process, connection = _source()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    connection.send((world, module, list(arguments), variables, apart))
    if not connection.poll(timeout):
        process.kill()
        process.wait()
        _source.cache_clear()
        raise TimeoutError(f"{module} {' '.join(arguments)}: the ranks take more than {timeout:g} s")
    failed = connection.recv()
    if failed:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {failed}; the ranks' standard error says why")


@functools.cache
def _source() -> tuple[subprocess.Popen[bytes], Connection]:
    """The process that is copied; it ends with this one."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    environment = {**os.environ, **for_child(), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, ours


def serve(connection: Connection) -> None:
    """Starts the ranks that are asked for, one request after the other, until nobody asks."""
    import torch.distributed  # noqa: F401

    with contextlib.suppress(EOFError):
        while True:
            world, module, arguments, variables, apart = connection.recv()
            try:
                if not apart:
                    importlib.import_module(module)
                failed = _run(world, module, arguments, variables)
            except Exception:
                failed = traceback.format_exc()
            connection.send(failed)


def _run(world: int, module: str, arguments: list[str], variables: dict[str, str]) -> str:
    """What failed; empty: nothing."""
    shared = {
        **variables, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    freeze_loaded()
    parent, ranks = os.getpid(), {}
    for rank in range(world):
        process_id = os.fork()
        if process_id == 0:
            own = {PARENT: str(parent), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            _be_rank(module, arguments, {**shared, **own})
        ranks[process_id] = rank
    failed = ""
    while ranks:
        process_id, status = os.wait()
        rank, code = ranks.pop(process_id), os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = f"rank {rank} ended with {code}"
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def _be_rank(module: str, arguments: list[str], variables: dict[str, str]) -> NoReturn:
    code = 1
    try:
        os.environ.clear()
        os.environ.update(variables)
        die_with_parent()
        sys.argv = [module, *arguments]
        importlib.import_module(module).main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    serve(Connection(int(sys.argv[1])))
