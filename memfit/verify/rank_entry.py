"""The module that every process of ``memfit verify`` starts with: SIGINT and SIGTERM end it at once, without a word.

It has nothing to save, and who started it says that it was stopped.
"""

import os
import sys

from memfit.child_process import die_with_parent
from memfit.garbage import frozen_imports
from memfit.printable import keep_terminal_safe
from memfit.train.launch.stop_signals import ends_at_once

if __name__ == "__main__":
    ends_at_once(lambda: None)
    die_with_parent()
    keep_terminal_safe()
    with frozen_imports():
        from memfit.verify import world_worker

    code = world_worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads abort a process that Python finalises while they still run
