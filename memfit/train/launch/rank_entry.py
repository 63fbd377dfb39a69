"""What torchrun starts, once for each rank; ends at once where this launch must not go on, before torch is imported."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from memfit.engine.torchrun_env import is_restart
from memfit.errors import Exit
from memfit.train.launch.outcome import read_outcome
from memfit.train.launch.process_guard import die_with_parent
from memfit.train.run_options import RunOptions


def main(options: RunOptions) -> int:
    """Trains as ``memfit.train.launch.worker`` does, with the same options."""
    before = read_outcome(Path(options.folder)) if is_restart() else None
    if before is not None:
        return before.code
    from memfit.train.launch import worker

    return worker.main(options)


def leave(code: int) -> None:
    """Ends this process. One that failed does not wait for collectives that the other ranks will never join."""
    if code == Exit.DONE:
        sys.exit(code)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    leave(main(RunOptions.from_json(sys.argv[1])))
