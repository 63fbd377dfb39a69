"""A script traced in the process of the test: no sandbox, no start of another Python."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.events import Trace
from memfit.script.launch import trace_script
from memfit.script.outcome import ScriptCommand, ScriptOutcome, TraceRequest
from memfit.script.run_script import run_script
from testing.truth import operator_names

LIBRARIES = {"accelerate.state", "transformers.trainer", "lightning.pytorch.trainer"}


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


def trace_alone(folder: Path, text: str, *, device: str = "rtx4090", **request: Any) -> ScriptOutcome:
    """The same for a script of a library's trainer, in a process of its own."""
    script = folder / "train.py"
    script.write_text(text)
    command = ScriptCommand(target=str(script), args=())
    return trace_script(TraceRequest(command=command, device=device, every_card=False, **request))


def real_peaks(folder: Path, bare: Trace) -> dict[str, int]:
    """The largest bytes of live tensors by phase where ``train.py`` really runs on the CPU, in a process of its own.

    Args:
        bare: what a trace of it showed, whose operators' inner blocks do not count.
    """
    operators = ",".join(sorted(operator_names(bare)))
    subprocess.run(
        [sys.executable, "-m", "tests.script.run_for_real", str(folder / "real.json"), operators, "train.py"],
        check=True, cwd=folder, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    peaks: dict[str, int] = json.loads((folder / "real.json").read_text())
    return peaks


@contextlib.contextmanager
def _process_kept(folder: Path) -> Iterator[None]:
    """Takes back what a script's run changes for good, since it has a process of its own.

    Raises:
        AssertionError: the script uses a library of trainers, which stays rewritten, and keeps the device of a process.
    """
    argv, path, environment, here = sys.argv, list(sys.path), dict(os.environ), os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    os.chdir(folder)
    loaded = LIBRARIES & sys.modules.keys()
    try:
        yield
        assert loaded == LIBRARIES & sys.modules.keys(), "a library's trainer stays as it is traced: write trace_alone"
    finally:
        os.chdir(here)
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
