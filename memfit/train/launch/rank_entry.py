"""The module that every training process starts with; what must hold before torch is imported comes first.

It ends with the process that started it, and at once where torchrun starts it again in a launch that must not go on.
"""

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
    """Ends this process. One that failed waits for what memfit still writes, and not for collectives that the other
    ranks will never join or for a job's own threads, such as those of a pool, which may never end."""
    if code == Exit.DONE:
        sys.exit(code)
    for thread in threading.enumerate():
        if thread.name.startswith("memfit-") and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    leave(main(RunOptions.from_json(sys.argv[1])))
