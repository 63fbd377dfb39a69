"""The module that every training process starts with; what must hold before torch is imported comes first.

It ends with the process that started it, and at once where torchrun starts it again in a launch that must not go on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from memfit.engine.torchrun_env import is_restart
from memfit.errors import Exit
from memfit.frame_room import in_frame_room
from memfit.garbage import frozen_imports
from memfit.printable import keep_terminal_safe
from memfit.train.launch.memory_limit import lift
from memfit.train.launch.outcome import read_outcome
from memfit.train.launch.process_guard import die_with_parent
from memfit.train.run_options import RunOptions

LEAVES_SECONDS = 5.0
"""Seconds that a process whose training is done waits for threads and exit handlers of the job."""


@in_frame_room
def main(options: RunOptions) -> int:
    """Trains as ``memfit.train.launch.worker`` does, with the same options."""
    before = read_outcome(Path(options.folder)) if is_restart() else None
    if before is not None:
        return before.code
    with frozen_imports():
        from memfit.train.launch import worker

    return worker.main(options)


def leave(code: int, work: str = "the training") -> None:
    """Ends this process, once what memfit still writes is written. Python's own finalisation is left out: threads of
    gloo may still ask for Python's lock in it.

    One that is done waits ``LEAVES_SECONDS`` for the job's threads and runs its exit handlers, as Python does. One that
    failed does not: collectives that the other ranks never join, and threads of a pool, may never end.

    Args:
        work: what was done, to say so where it waits.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("memfit-") and not thread.daemon:
            thread.join()
    if code == Exit.DONE:
        lift()  # the run is over: threads and exit handlers have the machine's memory again
        try:
            threading.Thread(target=_end_later, args=(code, work), name="memfit-leaves", daemon=True).start()
        except RuntimeError:  # the machine has no memory for a thread's stack
            _end(code)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads; before it, pools are told to end
        atexit._run_exitfuncs()
    _end(code)


def _end_later(code: int, work: str) -> None:
    """Ends this process though the job still holds it, and says what does."""
    time.sleep(LEAVES_SECONDS)
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    what = f"the job's threads ({', '.join(names)}) have" if names else "the job's exit handlers have"
    print(
        f"memfit: {work} is done, and {what} not ended {LEAVES_SECONDS:g} s later: they are ended now",
        file=sys.stderr,
    )
    _end(code)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the job may have closed it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    keep_terminal_safe()
    leave(main(RunOptions.from_json(sys.argv[1])))
