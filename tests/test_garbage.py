"""pytest tests/test_garbage.py: objects that are frozen for traces are freed with the process."""

import subprocess
import sys

SCRIPT = """
import os
from memfit.garbage import collected_before, frozen_within

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self, write=os.write):
        write(1, b"freed")

cycle = Cycle()
command = frozen_within()
command.__enter__()
with collected_before():
    pass
del cycle
os.write(1, b"at the end: ")
"""


def test_what_is_frozen_is_freed_at_the_end_of_the_process():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert ended.stdout == "at the end: freed"


IN_A_COMMAND = """
import gc
from memfit.garbage import collected_before, frozen_within

with frozen_within():
    for _ in range(2):
        with collected_before():
            pass
    kept = gc.get_freeze_count()
print(kept > 0, gc.get_freeze_count())
"""


def test_what_the_first_trace_of_a_command_freezes_stays_so_until_the_command_ends():
    ended = subprocess.run([sys.executable, "-c", IN_A_COMMAND], capture_output=True, text=True, check=True)
    assert ended.stdout == "True 0\n"


AT_THE_START = """
import gc
from memfit.garbage import freeze_loaded, frozen_imports

with frozen_imports():
    inside = gc.isenabled()
    import json, decimal, xml.dom.minidom
imported = gc.get_freeze_count()
loaded = [[] for _ in range(1000)]
freeze_loaded()
print(inside, gc.isenabled(), imported > 1000, gc.get_freeze_count() >= imported + 1000)
"""


def test_imports_run_without_the_collector_which_passes_them_and_what_was_loaded_over_later():
    ended = subprocess.run([sys.executable, "-c", AT_THE_START], capture_output=True, text=True, check=True)
    assert ended.stdout == "False True True True\n"
