"""A reader that leaves, as ``| head`` does, is no fault: no words on standard error, and the verb's own exit code."""

import subprocess
import sys


def test_a_verb_whose_reader_has_left_ends_quietly():
    memfit = f"{sys.executable} -m memfit devices"
    script = f'{memfit} | true; codes=("${{PIPESTATUS[@]}}"); exit ${{codes[0]}}'
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_what_is_read_is_whole():
    whole = subprocess.run([sys.executable, "-m", "memfit", "devices"], capture_output=True, text=True, check=True)
    script = f"{sys.executable} -m memfit devices | head -n 2"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "".join(whole.stdout.splitlines(keepends=True)[:2])
