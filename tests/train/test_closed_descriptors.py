"""A job that closes descriptors that it did not open: the run goes on or says so in one line, and writes no wrong file.

python -m pytest tests/train/test_closed_descriptors.py
"""

import errno
import os
from dataclasses import replace

import pytest

from memfit.errors import Exit
from memfit.plan import read_plan, write_plan
from memfit.train.append_file import AppendFile, identity
from memfit.train.launch.ending import closed_descriptor
from memfit.train.launch.launch import judged
from memfit.train.launch.outcome import Outcome, write_outcome
from memfit.train.launch.supervisor import Supervisor
from memfit.train.run_folder import RunFolder
from testing.attacker import JOBS, make_plan, run_plan
from tests.train.test_child_processes import said


def test_lines_do_not_go_into_a_file_that_has_taken_the_number(tmp_path):
    lines, other = AppendFile(tmp_path / "lines"), tmp_path / "other"
    lines.write(b"one\n")
    os.close(lines._descriptor)
    taken = os.open(other, os.O_WRONLY | os.O_CREAT)
    assert taken == lines._descriptor
    lines.write(b"two\n")
    os.close(lines._descriptor)
    lines.close()
    assert identity(taken) is not None
    os.close(taken)
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"
    assert other.read_bytes() == b""


def test_a_file_does_not_take_the_place_of_standard_error(tmp_path):
    code, _, _ = said(f"""
import os
from pathlib import Path
from memfit.train.append_file import AppendFile
os.closerange(0, 3)
AppendFile(Path({str(tmp_path / "lines")!r})).write(b"one")
os.write(2, b"what C prints")
""")
    assert code != 0
    assert (tmp_path / "lines").read_bytes() == b"one"


def test_a_closed_descriptor_is_the_jobs_mistake():
    assert "did not open" in str(closed_descriptor(OSError(errno.EBADF, "Bad file descriptor")))
    assert closed_descriptor(OSError(errno.ENOSPC, "No space left on device")) is None


@pytest.mark.parametrize("code", [Exit.BAD_INPUT, Exit.FAULT])
def test_a_line_that_no_process_could_print_is_said_by_memfit_run(tmp_path, code):
    write_outcome(tmp_path, Outcome(code=code, unsaid="the line"))
    launched = judged(RunFolder(tmp_path), code, Supervisor())
    assert launched.code == code
    assert launched.line.endswith("the line")


def test_a_line_of_a_process_without_standard_error_is_kept(tmp_path):
    code, heard, _ = said(f"""
import os, sys
from pathlib import Path
from memfit.train.launch.outcome import Outcome, keep_stderr, write_outcome
keep_stderr()
os.closerange(2, 4096)
write_outcome(Path({str(tmp_path)!r}), Outcome(code=2), "the line")
os._exit(0)
""")
    assert (code, heard) == (0, "")
    assert judged(RunFolder(tmp_path), 2, Supervisor()).line == "the line"


@pytest.mark.slow
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2), (2, 3), (0, 1000), (3, 1000), (0, 4096)])
def test_a_run_whose_job_closes_descriptors(tmp_path, first, last):
    plan, run = tmp_path / "plan.toml", tmp_path / "run"
    make_plan("plain", plan)
    read = read_plan(plan)
    settings = {**read.settings, "first": first, "last": last}
    write_plan(replace(read, job=f"{JOBS}:Closes", settings=settings), plan)
    code, heard = run_plan(plan, run)
    assert code in (0, 2, 5), heard
    assert "Traceback" not in heard
    assert code == 0 or heard.rstrip().splitlines()[-1].startswith("memfit: "), (code, heard)
    assert (code == 0) == ("Done" in heard)
