"""What a run writes is on disk at once."""

import json
import subprocess
import sys
import time

from memfit.train.run_folder import RunFolder

KEEPS_THE_LOCK = """
import ctypes, sys
from memfit.train.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.open(resume=False)
for window in range(3):
    folder.append("metrics", {"window": window})
ctypes.PyDLL(None).pause()
"""
"""Ends in a call that keeps Python's lock: no other thread could write lines that wait."""


def test_a_line_is_on_disk_when_it_was_added(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    for window in range(5):
        for name in ("metrics", "losses"):
            folder.append(name, {"window": window})
            assert json.loads(folder.lines(name).read_text().splitlines()[-1]) == {"window": window}
    folder.close()


def test_finished_windows_are_on_disk_while_a_call_keeps_pythons_lock(tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", KEEPS_THE_LOCK, str(run)]) as process:
        try:
            latest = time.monotonic() + 60
            while not _lines(run) and time.monotonic() < latest:
                time.sleep(0.05)
            time.sleep(1)
            assert _lines(run) == 3
        finally:
            process.kill()


def _lines(run):
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0
