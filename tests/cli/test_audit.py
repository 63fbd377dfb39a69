"""pytest tests/cli/test_audit.py"""

import json
import subprocess
import sys
from pathlib import Path

TARGETS = Path(__file__).parents[1] / "audit"


def memfit(*arguments, **environment):
    import os

    run = [sys.executable, "-m", "memfit", "audit", *arguments]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment}
    return subprocess.run(run, capture_output=True, text=True, env=surroundings, check=False)


def test_a_fault_is_exit_code_4_and_one_json_object() -> None:
    done = memfit(f"{TARGETS}/faults/system_faults.py:sovits_s1", "--world-sizes", "1,2,3", "--json")
    assert done.returncode == 4
    answer = json.loads(done.stdout)
    assert {finding["code"] for finding in answer["findings"]} == {"double-sharding"}


def test_what_is_right_is_exit_code_0_and_fits_80_columns_without_colour() -> None:
    own = f"{TARGETS}/right/memfit_samplers.py:own"
    done = memfit(own, "--world-sizes", "1,2,8", "--global-batch", "16000", "--unit", "frames")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("No fault")
    assert "\x1b[" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "padding" in done.stdout


def test_bad_input_is_exit_code_2_and_one_line() -> None:
    for arguments in (["none"], [f"{TARGETS}/right/memfit_samplers.py:own", "--world-sizes", "two"],
                      [f"{TARGETS}/right/memfit_samplers.py:own", "--global-batch", "0"]):  # fmt: skip
        done = memfit(*arguments)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert not done.stdout


def test_what_a_target_prints_stays_off_standard_output(tmp_path) -> None:
    (tmp_path / "t.py").write_text("print('loading')\ndef f(rank, world):\n    print(rank)\n    return [[0], [1]]\n")
    done = memfit(f"{tmp_path}/t.py:f", "--world-sizes", "1", "--json")
    assert json.loads(done.stdout)["dataset_size"] == 2
