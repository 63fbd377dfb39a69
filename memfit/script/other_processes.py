"""Notes the processes of Python that a script starts: a trace follows none of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from memfit.device.virtual.patching import replaced


@contextmanager
def other_processes(note: Callable[[], None]) -> Iterator[None]:
    """Context in which ``note`` is called where a process of ``multiprocessing``, or another Python, is started."""
    start, open_ = BaseProcess.start, subprocess.Popen.__init__

    @wraps(start)
    def started(self: BaseProcess) -> None:
        note()
        start(self)

    @wraps(open_)
    def opened(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if _is_python(args):
            note()
        open_(self, args, *rest, **options)

    with replaced(BaseProcess, start=started), replaced(subprocess.Popen, __init__=opened):
        yield


def _is_python(command: Any) -> bool:
    """Whether a command runs a Python, or a launcher of this one's."""
    words = command.split() if isinstance(command, str) else list(command) if isinstance(command, list | tuple) else []
    program = Path(str(words[0])).name if words else ""
    return program.startswith("python") or program in (Path(sys.executable).name, "torchrun", "accelerate", "deepspeed")
