"""Spoiled inputs of every kind are answered in one line; the long part is 5,000 of them.

python -m pytest tests/attack/test_fuzz.py [-m slow]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def fuzz(tmp_path, cases, seed):
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "bench.fuzz", "--cases", str(cases), "--seed", str(seed), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("cases", [54, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_spoiled_input_ends_in_a_traceback(tmp_path, cases):
    result = fuzz(tmp_path, cases, seed=20)
    assert result["failed"] == 0
    assert set(result["exit_codes"]) <= {"0", "2", "3", "4", "5"}
    assert result["exit_codes"]["2"] > cases / 3
