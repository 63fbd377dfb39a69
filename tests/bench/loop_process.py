"""Loops of recipes traced in a process of their environment's own, whose packages shadow those of the tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.accuracy_parts import environments

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from bench.accuracy_parts import environments
from bench.accuracy_parts.loop import Loop, trace_loop
from memfit.device.hardware.catalogue import find_device
from memfit.planner.prediction import footprint_on

environments.enter(sys.argv[1])
card, peaks = find_device("a10g"), []
for given in json.loads(sys.argv[2]):
    train = footprint_on(trace_loop(Loop(**given), card), card).phases["train"]
    peaks.append([train.allocated_bytes, train.categories["frozen"]])
print(json.dumps(peaks))
"""


def peaks(environment, *loops):
    """(allocated, frozen) bytes at the peak of each loop; skips where the environment is not installed."""
    if not (environments.environments_folder() / environment / "complete").exists():
        pytest.skip(f"the environment {environment} is not installed")
    command = [sys.executable, "-c", PROGRAM, environment, json.dumps(loops)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
