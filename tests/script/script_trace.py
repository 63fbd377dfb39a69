"""A script traced in the process of the test: no sandbox, no start of another Python."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.script.outcome import ScriptCommand, ScriptOutcome, TraceRequest
from memfit.script.run_script import run_script


def trace_here(folder: Path, text: str, *, world: int = 1, device: str = "rtx4090", **request: Any) -> ScriptOutcome:
    """What a script of this text showed; it writes nothing to its folder but what it opens itself."""
    script = folder / "train.py"
    script.write_text(text)
    environment = {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"} if world > 1 else {}
    command = ScriptCommand(target=str(script), args=(), world=world, environment=environment)
    outcomes: list[ScriptOutcome] = []
    with _process_kept(folder):
        run_script(
            TraceRequest(command=command, device=device, unsafe_writes=True, every_card=False, **request),
            outcomes.append,
        )
    return outcomes[0]


@contextlib.contextmanager
def _process_kept(folder: Path) -> Iterator[None]:
    """What a script's run changes for good, since it has a process of its own."""
    argv, path, environment, here = sys.argv, list(sys.path), dict(os.environ), os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
