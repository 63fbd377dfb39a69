"""What the tests of the command line share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOBS = "tests/cli/wrong_jobs.py"
RIGHT = f"{JOBS}:Right"
AT = ("predict", RIGHT, "--device", "cpu")

Run = Callable[..., tuple[int, str, str]]
"""Runs one command line: (exit code, standard output, standard error)."""


def is_one_line(result: tuple[int, str, str], *words: str) -> None:
    """Asserts a user's mistake: ``memfit: SEEN: WHY; WRITE`` on standard error alone, exit code 2."""
    code, out, err = result
    assert (code, out) == (2, ""), result
    assert err.startswith("memfit: ")
    assert err.count("\n") == 1
    assert ": " in err.removeprefix("memfit: ")
    assert "; " in err
    for word in words:
        assert word in err


def really(*arguments: str) -> tuple[int, str, str]:
    """One command line in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = [sys.executable, "-m", "memfit", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr
