"""Stacks of a training process that a crash in native code ended (SIGSEGV, say): written by ``faulthandler``, which
needs neither memory nor the interpreter, and named by whoever started the process."""

from __future__ import annotations

import contextlib
import faulthandler
import re
from collections.abc import Iterator

from memfit.engine.torchrun_env import launch_suffix
from memfit.errors import call_in, line_of_job_in
from memfit.train.run_folder import RunFolder

_CRASHED = re.compile(r"Current thread .*?(?:\n\n|\Z)", re.DOTALL)


@contextlib.contextmanager
def writing_crash_stacks(folder: RunFolder, rank: int) -> Iterator[None]:
    """Where native code crashes while this is open, the stacks of all threads go to RUN/stacks/crash-RANK.txt."""
    path = folder.stacks / f"crash-{rank}{launch_suffix()}"
    try:
        folder.stacks.mkdir(exist_ok=True)
        file = open(path, "wb", buffering=0)  # noqa: SIM115
    except OSError:  # what cannot be written is told by the run itself
        yield
        return
    before = faulthandler.is_enabled()
    faulthandler.enable(file=file)
    try:
        yield
    finally:
        faulthandler.disable()
        if before:
            with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):  # standard error is closed
                faulthandler.enable()
        file.close()
        with contextlib.suppress(OSError):
            path.unlink()
            folder.stacks.rmdir()


def describe_crash(folder: RunFolder) -> str:
    """``, a crash in native code that net.py:41 in loss() called (stacks: FILE)``; empty where no rank has crashed."""
    for path in sorted(folder.stacks.glob("crash-*")):
        with contextlib.suppress(OSError):
            text = path.read_text("utf-8", errors="replace")
            if text:
                return f", a crash in native code{_called_by(text)} (stacks: {path})"
    return ""


def _called_by(text: str) -> str:
    """The call of the thread that crashed: the innermost line of a job's code, else of any."""
    crashed = _CRASHED.search(text)
    stack = text if crashed is None else crashed[0]
    place = line_of_job_in(stack) or call_in(stack)
    return "" if place is None else f" that {place} called"
