"""pytest tests/test_process_end.py: a verb ends with its answer, and what a job has not written is written."""

import subprocess
import sys
from pathlib import Path

import pytest

HELP = ["jobs", "--help"]
VERB = """
import atexit, os, sys
import memfit.cli
from memfit.__main__ import main

class Noted:
    def __del__(self, write=os.write):
        write(2, b"finalised ")

def verb(run=memfit.cli.main):
    global noted, opened
    noted, opened = Noted(), {opened}
    atexit.register(os.write, 2, b"handler ")
    run({arguments})

memfit.cli.main = verb
main()
"""
"""A verb of a job that leaves an object, an open file and an exit handler behind."""


def _ended(arguments: list[str], opened: str = "None") -> subprocess.CompletedProcess[str]:
    code = VERB.format(opened=opened, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not known which files are open")
def test_handlers_run_and_output_is_whole_but_nothing_is_finalised():
    ended = _ended(HELP)
    assert (ended.returncode, ended.stderr) == (0, "handler ")
    assert "--json" in ended.stdout


@pytest.mark.parametrize(("arguments", "code"), [(["jobs", "no-such-job"], 2), (["nothing"], 2)])
def test_the_code_is_that_of_the_verb(arguments: list[str], code: int):
    assert _ended(arguments).returncode == code


@pytest.mark.parametrize("opened", ["open({path!r}, 'w')", "open({path!r}, 'r+')"])
def test_what_a_job_has_not_written_yet_is_written(opened: str, tmp_path: Path):
    path = tmp_path / "log"
    path.touch()
    ended = _ended(HELP, f"{opened.format(path=str(path))}; opened.write('kept')")
    assert (ended.returncode, path.read_text()) == (0, "kept")
    assert "finalised" in ended.stderr


def test_a_temporary_file_is_deleted(tmp_path: Path):
    assert _ended(HELP, f"__import__('tempfile').NamedTemporaryFile(dir={str(tmp_path)!r})").returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_read_is_no_reason_to_finalise(tmp_path: Path):
    path = tmp_path / "data"
    path.touch()
    assert "finalised" not in _ended(HELP, f"open({str(path)!r})").stderr
