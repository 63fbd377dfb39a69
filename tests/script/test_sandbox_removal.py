"""A trace that is stopped leaves no folder of its sandbox behind, however it ends.

python -m pytest tests/script/test_sandbox_removal.py
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.asking import ROOT

WRITES = """
import os, time, torch
with open("checkpoint.pt", "wb") as file:
    file.write(b"x" * 1_000_000)
os.makedirs("run/deep", exist_ok=True)
print("written", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, 5), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_trace_that_is_stopped_leaves_no_folder(tmp_path, number, code):
    script, temporary = tmp_path / "train.py", tmp_path / "temporary"
    script.write_text(WRITES)
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "memfit", "trace", "--device", "rtx4090", "--", "python", str(script)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    for line in process.stderr:
        if b"written" in line:
            break
    assert list(temporary.glob("memfit-sandbox-*"))
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    end = time.monotonic() + 10
    while list(temporary.glob("memfit-sandbox-*")) and time.monotonic() < end and number == signal.SIGKILL:
        time.sleep(0.05)
    assert not list(temporary.glob("memfit-sandbox-*"))
