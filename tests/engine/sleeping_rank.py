"""A rank that does nothing, for tests of how ranks start and end."""

import os
import sys
import time
from pathlib import Path

from memfit.child_process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    for folder in sys.argv[1:]:
        Path(folder, f"{os.getpid()}.pid").touch()
    time.sleep(120)
