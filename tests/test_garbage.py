"""pytest tests/test_garbage.py: objects that are frozen for traces are freed with the process."""

import subprocess
import sys

SCRIPT = """
import os
from memfit.garbage import keep_frozen

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self, write=os.write):
        write(1, b"freed")

cycle = Cycle()
keep_frozen()
del cycle
"""


def test_what_is_frozen_is_freed_at_the_end_of_the_process():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert ended.stdout == "freed"
